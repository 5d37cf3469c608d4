"""The page at `/` in a real browser."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_rewind.server.jobs import Limits
from serving import Served, new_worker, reference, served

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def server(loaded: tuple[Any, Any]) -> Iterator[Served]:
    with served(new_worker(loaded, limits=Limits(max_tokens=300, max_prompt=2000))) as one:
        yield one


@pytest.fixture
def page(server: Served) -> Iterator[Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is missing (Debian: apt-get install chromium)")
    with playwright_api.sync_playwright() as playwright:
        options: Any = {"executable_path": chromium, "args": ["--no-sandbox"]}
        browser = playwright.chromium.launch(**options)
        one = browser.new_page()
        one.set_default_timeout(30_000)
        one.goto(server.url)
        yield one
        browser.close()


def ask(page: Any, text: str) -> None:
    page.keyboard.type(text)  # the field has the focus
    page.keyboard.press("Enter")


def test_a_message_streams_and_its_drafts_are_shaded(
    page: Any, server: Served, loaded: tuple[Any, Any]
) -> None:
    ask(page, "Count to three.")
    page.wait_for_function("document.querySelector('#stats').textContent.includes('per step')")
    answer = page.locator(".assistant").first
    assert answer.text_content() == reference(loaded, "Count to three.", 300)
    assert answer.locator("span").count() > 5  # it came in pieces
    assert answer.locator(".draft").count() > 0
    shade = "getComputedStyle(document.querySelector('.draft')).backgroundColor"
    shaded = page.evaluate(shade)
    page.locator("#shade").uncheck()
    assert page.evaluate(shade) != shaded
    stats = page.locator("#stats").text_content()
    assert "drafts accepted, by position" in stats
    assert "bitwise" in stats


def test_an_answer_can_be_stopped_and_the_talk_survives_a_reload(page: Any, server: Served) -> None:
    ask(page, "def f(x):")
    page.wait_for_selector(".assistant span")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:enabled")
    assert page.locator("#stop").is_disabled()
    shown = page.locator(".message").all_text_contents()
    page.reload()
    assert page.locator(".message").all_text_contents() == shown
    page.locator("#clear").click()
    assert page.locator(".message").count() == 0


def test_text_is_never_markup(page: Any) -> None:
    ask(page, "<img src=x onerror=document.title='bad'>")
    page.wait_for_selector("#send:enabled")
    assert page.locator(".user img").count() == 0
    assert page.title() == "mlx-rewind"


def test_light_and_dark_are_both_readable(page: Any) -> None:
    colours = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours.append(page.evaluate("getComputedStyle(document.body).color"))
    assert colours[0] != colours[1]
    for name in ("#text", "#send", "#shade", "#clear"):
        page.locator(name).focus()
        assert page.evaluate("document.activeElement.id") == name[1:]


def test_errors_are_shown(page: Any, server: Served) -> None:
    page.locator("#text").fill("word " * 40_000)
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant .error")
    assert "prompt" in page.locator(".error").text_content()
