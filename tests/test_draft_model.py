"""DraftModel: its own cache follows what was committed, for every kind of cache."""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

import mlx_rewind
import zoo
from mlx_rewind import DraftModel, UnsupportedCacheError
from mlx_rewind.draft.protocol import Session
from mlx_rewind.target import Target

PROMPT = zoo.PROMPTS[1]
FAMILIES = ["qwen3_5", "lfm2", "gpt_oss", "mamba2", "llama"]  # gpt_oss with a window of 8


class Flipping(nn.Module):
    """A model whose every n-th answer is rotated by one token id; 0 for never."""

    def __init__(self, inner: nn.Module, every: int = 0) -> None:
        super().__init__()
        self.inner = inner
        self.every = every
        self.calls = 0

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits = self.inner(inputs, cache=cache)
        self.calls += 1
        return mx.roll(logits, 1, axis=-1) if self.flips(self.calls) else logits

    def flips(self, call: int) -> bool:
        return self.every > 0 and call % self.every == 0

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.inner)


class Proposal(NamedTuple):
    """The tokens of the row, what was proposed after them, and the call behind the first of it."""

    row: list[int]
    tokens: list[int]
    first_call: int


class Watched(DraftModel):
    """A draft model whose session can be looked at. It serves one row."""

    session: Any
    proposals: list[Proposal]

    def start(self, target: Target) -> Session:
        self.session = super().start(target)
        self.proposals = []
        if isinstance(self.model, Flipping):
            self.model.calls = 0
        return _Tap(self)

    def assert_in_step(self, name: str) -> None:
        """Between rounds the draft cache holds the row as it was at the last proposal."""
        model = getattr(self.model, "inner", self.model)
        expected = zoo.feed(model, self.proposals[-1].row)
        zoo.assert_state_equal(self.session.cache, expected, zoo.tolerance(name))


class _Tap(Session):
    def __init__(self, drafter: Watched) -> None:
        self.drafter = drafter

    def propose(self, tokens: list[int], num_draft_tokens: int) -> mx.array:
        row, call = list(tokens), getattr(self.drafter.model, "calls", 0) + 1
        proposal: mx.array = self.drafter.session.propose(tokens, num_draft_tokens)
        self.drafter.proposals.append(Proposal(row, proposal.tolist(), call))
        return proposal

    def close(self) -> None:
        self.drafter.session.close()


def self_drafter(name: str, every: int = 0, **options: Any) -> Watched:
    return Watched(Flipping(zoo.build(name, fresh=True), every), **options)


def generate(name: str, drafter: Any, k: int, n: int, **options: Any) -> list[int]:
    steps = mlx_rewind.generate_step(
        options.pop("prompt", PROMPT),
        zoo.build(name),
        drafter=drafter,
        num_draft_tokens=k,
        max_tokens=n,
        **options,
    )
    return [token for token, _, _ in steps]


def assert_rejected_at_flips_only(drafter: Watched, tokens: list[int]) -> None:
    """The first rejection of every round is at a flipped proposal, and there is one if there is
    a flip: anything else is a draft cache that has lost its place."""
    for row, proposed, first_call in drafter.proposals:
        truth = [*PROMPT, *tokens][len(row) :]
        compared = list(enumerate(zip(proposed, truth, strict=False)))
        wrong = next((i for i, (a, b) in compared if a != b), None)
        flips = [i for i, _ in compared if drafter.model.flips(first_call + i)]
        assert wrong == (flips[0] if flips else None), f"after {len(row)} tokens of the row"


# --- the draft's cache -----------------------------------------------------------------------


@pytest.mark.parametrize(("k", "every"), [(1, 2), (2, 3), (3, 2), (4, 3), (4, 7), (5, 3)])
def test_a_hybrid_draft_is_rejected_where_it_was_flipped_only(k: int, every: int) -> None:
    drafter = self_drafter("qwen3_5", every)
    tokens = generate("qwen3_5", drafter, k, 40)
    assert tokens == zoo.reference("qwen3_5", PROMPT, 40).tokens
    assert_rejected_at_flips_only(drafter, tokens)
    drafter.assert_in_step("qwen3_5")


@pytest.mark.parametrize("name", FAMILIES[1:])
@pytest.mark.parametrize(("k", "every"), [(1, 3), (3, 1), (5, 4)])
def test_so_is_every_other_kind(name: str, k: int, every: int) -> None:
    drafter = self_drafter(name, every)
    tokens = generate(name, drafter, k, 32)
    assert tokens == zoo.reference(name, PROMPT, 32).tokens
    assert_rejected_at_flips_only(drafter, tokens)
    drafter.assert_in_step(name)


def test_a_long_text_keeps_the_draft_in_step() -> None:
    drafter = self_drafter("qwen3_5", 3)
    tokens = generate("qwen3_5", drafter, 4, 80)
    assert tokens == zoo.reference("qwen3_5", PROMPT, 80).tokens
    assert_rejected_at_flips_only(drafter, tokens)
    drafter.assert_in_step("qwen3_5")


@pytest.mark.parametrize("every", [0, 7])
@pytest.mark.parametrize("prompt", zoo.PROMPTS[1:], ids=len)
def test_a_draft_longer_than_the_window(every: int, prompt: list[int]) -> None:
    drafter = self_drafter("gpt_oss", every)
    tokens = generate("gpt_oss", drafter, 10, 32, prompt=prompt)
    assert tokens == zoo.reference("gpt_oss", prompt, 32).tokens
    drafter.assert_in_step("gpt_oss")


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("taken", [1, 3, 7])
def test_closing_early_leaves_the_draft_in_step(name: str, taken: int) -> None:
    drafter = self_drafter(name, 4)
    steps = mlx_rewind.generate_step(PROMPT, zoo.build(name), drafter=drafter, num_draft_tokens=4)
    for _ in range(taken):
        next(steps)
    steps.close()
    drafter.assert_in_step(name)


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_a_prompt_in_chunks_is_the_same_prompt(name: str) -> None:
    prompt = zoo.PROMPTS[2]
    expected = zoo.reference(name, prompt, 24).tokens
    for step in (3, 19):
        drafter = self_drafter(name, prefill_step_size=step)
        assert generate(name, drafter, 3, 24, prompt=prompt) == expected
        assert len(drafter.proposals) == 6  # blocks of 4, all accepted
        drafter.assert_in_step(name)


# --- any draft, any target -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "draft"),
    [*(("qwen3_5", draft) for draft in FAMILIES), ("gpt_oss", "gpt_oss"), ("gpt_oss", "lfm2")],
)
def test_a_draft_of_another_family_changes_nothing(target: str, draft: str) -> None:
    drafter = Watched(zoo.build(draft, seed=77))
    assert generate(target, drafter, 3, 20) == zoo.reference(target, PROMPT, 20).tokens
    drafter.assert_in_step(draft)


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_the_target_may_be_its_own_draft(name: str) -> None:
    drafter = DraftModel(zoo.build(name))
    expected = zoo.reference(name, PROMPT, 24).tokens
    assert generate(name, drafter, 4, 24) == expected


def test_one_draft_model_serves_rows_in_turn_and_at_once() -> None:
    drafter = DraftModel(zoo.build("lfm2", fresh=True))
    prompts = zoo.PROMPTS[1:]
    streams = [
        mlx_rewind.generate_step(prompt, zoo.build("lfm2"), drafter=drafter, max_tokens=24)
        for prompt in prompts
    ]
    rows = list(zip(*streams, strict=True))
    for i, prompt in enumerate(prompts):
        assert [row[i][0] for row in rows] == zoo.reference("lfm2", prompt, 24).tokens
        assert sum(row[i][2] for row in rows) >= 19


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_a_drafter_that_has_not_seen_the_history_is_still_exact(name: str) -> None:
    model, history = zoo.build(name), zoo.PROMPTS[2]
    expected = zoo.reference(model, [*history, *PROMPT], 20).tokens
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([history]), cache=cache))
    drafter = self_drafter(name)
    assert generate(name, drafter, 3, 20, prompt_cache=cache) == expected
    assert drafter.proposals[0].row == PROMPT
    drafter.assert_in_step(name)
    held = zoo.feed(model, [*history, *PROMPT, *expected[:-1]])
    zoo.assert_state_equal(cache, held, zoo.tolerance(name))


# --- vocabularies of different sizes ---------------------------------------------------------

WIDE = 128
FAVOURITE = 110


class Fed(nn.Module):
    """A model that notes the largest token id it is ever fed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.largest = 0

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self.largest = max(self.largest, int(inputs.max().item()))
        return self.inner(inputs, cache=cache)

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.inner)


def widened(name: str, fill: float) -> nn.Module:
    """The model `name` with `WIDE` ids: those of `VOCAB` as they are, the others times `fill`."""
    wide = zoo.build(name, fresh=True, vocab_size=WIDE)
    narrow = dict(tree_flatten(zoo.build(name).parameters()))

    def common(path: str, weight: mx.array) -> mx.array:
        if weight.shape == narrow[path].shape:
            return narrow[path]
        return mx.concatenate([narrow[path], fill * weight[zoo.VOCAB :]])

    weights = [(path, common(path, weight)) for path, weight in tree_flatten(wide.parameters())]
    wide.update(tree_unflatten(weights))
    return wide


def preferring(model: nn.Module, token: int) -> nn.Module:
    """`model` with a bias in its head that makes it say `token`, whatever it is asked."""
    owner = getattr(model, "language_model", model)
    head = nn.Linear(owner.lm_head.weight.shape[1], WIDE, bias=True)
    head.weight, head.bias = owner.lm_head.weight, 1e4 * (mx.arange(WIDE) == token)
    owner.lm_head = head
    return model


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
@pytest.mark.parametrize("favourite", [False, True])
def test_a_draft_with_more_ids_than_the_target(name: str, favourite: bool) -> None:
    draft = widened(name, fill=0.0)
    if favourite:
        draft = preferring(draft, FAVOURITE)
        assert mx.argmax(draft(mx.array([PROMPT]))[0, -1]).item() == FAVOURITE
    target, drafter = Fed(zoo.build(name)), Watched(draft)
    steps = list(mlx_rewind.generate_step(PROMPT, target, drafter=drafter, max_tokens=30))
    assert [token for token, _, _ in steps] == zoo.reference(name, PROMPT, 30).tokens
    assert sum(from_draft for _, _, from_draft in steps) == 24  # the padding is never proposed
    assert target.largest < zoo.VOCAB
    drafter.assert_in_step(name)


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
def test_a_target_with_more_ids_than_the_draft(name: str) -> None:
    target = widened(name, fill=0.0)
    drafter = Watched(zoo.build(name, fresh=True))
    steps = list(mlx_rewind.generate_step(PROMPT, target, drafter=drafter, max_tokens=30))
    assert [token for token, _, _ in steps] == zoo.reference(name, PROMPT, 30).tokens
    assert sum(from_draft for _, _, from_draft in steps) == 24
    drafter.assert_in_step(name)


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
def test_a_target_that_says_what_the_draft_has_no_id_for(name: str) -> None:
    target = widened(name, fill=1.5)
    expected = zoo.reference(target, PROMPT, 40).tokens
    assert max(expected) >= zoo.VOCAB
    draft = Fed(zoo.build(name, fresh=True))
    steps = mlx_rewind.generate_step(PROMPT, target, drafter=DraftModel(draft), max_tokens=40)
    assert [token for token, _, _ in steps] == expected
    assert draft.largest < zoo.VOCAB


def test_a_target_that_always_says_the_padding() -> None:
    target = preferring(widened("qwen3_5", fill=0.0), FAVOURITE)
    drafter = DraftModel(zoo.build("qwen3_5", fresh=True))
    steps = mlx_rewind.generate_step(PROMPT, target, drafter=drafter, max_tokens=8)
    assert [token for token, _, _ in steps] == [FAVOURITE] * 8


# --- what is refused -------------------------------------------------------------------------


class Unknown(KVCache):
    """A cache class that nobody has an undo for."""


class Odd(Flipping):
    def make_cache(self) -> list[Any]:
        return [Unknown() for _ in make_prompt_cache(self.inner)]


def test_a_draft_that_cannot_be_rolled_back_is_refused() -> None:
    with pytest.raises(UnsupportedCacheError, match="Unknown"):
        DraftModel(Odd(zoo.build("llama")))


@pytest.mark.parametrize("step", [0, -1])
def test_a_prefill_step_of_nothing_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="prefill_step_size"):
        DraftModel(zoo.build("llama"), prefill_step_size=step)
