"""The audit: which checks run, in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..batch import token_ids
from ..cache.round import check
from ..draft.protocol import Drafter, Proposer, kind_of, start
from ..target import Target, exactness
from .checks import Checks
from .judge import Judge, Place
from .neighbours import neighbours
from .records import Check, Report
from .rounding import Bounds
from .runs import Plain
from .sampled import Sampled

#: progress(done, total, what is next)
Progress = Callable[[int, int, str], None]

WINDOWS = "windows"
FORCED = "accept lengths"
DRAFTER = "drafter"
BATCH = "neighbours"
DISTRIBUTION = "distribution"


def audit(
    model: nn.Module,
    prompts: Sequence[Sequence[int] | mx.array],
    *,
    drafter: Drafter | Proposer | None = None,
    num_draft_tokens: int = 4,
    max_tokens: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Compares speculative decoding of `model` with plain decoding by mlx-lm, on this machine.

    prompts             token ids of each
    drafter             is audited too, if given; every accept length is forced without one
    num_draft_tokens    draft tokens per round, K
    max_tokens          tokens of each text; end tokens do not end it
    seed                of the random draws: an audit can be repeated. mlx's random state is set.

    Raises ValueError for a bad argument, and as `generate_step` for what cannot be speculated.
    """
    ids = [token_ids(prompt) for prompt in prompts]
    if not ids or num_draft_tokens < 1 or max_tokens < num_draft_tokens + 2:
        raise ValueError(
            "an audit needs a prompt, num_draft_tokens of 1 or more, and max_tokens of at least 2 "
            f"more than that; got {len(ids)} prompts, {num_draft_tokens} and {max_tokens}"
        )
    cache = make_prompt_cache(model)
    check(model, cache).check_windows()
    target = Target(model)
    if drafter is not None:
        start(drafter, target)  # refuses now what it would refuse later
    level = exactness(model, cache)
    judge = Judge(Bounds.of(model, cache, level))
    checks = Checks(
        model,
        judge,
        target.vocab_size,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
    )
    sampled = Sampled(model, judge, target.vocab_size, num_draft_tokens, seed)
    found, plains = _run(checks, sampled, ids, max_tokens, progress or (lambda *_: None))
    return Report(
        exactness=level,
        device="cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu",
        logits_dtype=str(plains[0].logits[0].dtype).removeprefix("mlx.core."),
        gap_bound=judge.bounds.gap,
        prompts=len(ids),
        max_tokens=max_tokens,
        num_draft_tokens=num_draft_tokens,
        draft_kind=kind_of(drafter),
        seed=seed,
        checks=found,
    )


def _run(
    checks: Checks, sampled: Sampled, ids: list[list[int]], max_tokens: int, progress: Progress
) -> tuple[list[Check], list[Plain]]:
    of_one = {
        WINDOWS: ("windows that keep all their tokens", checks.windows),
        "tails": ("caches after two rejected tails", checks.tails),
        FORCED: ("every length forced; each round's caches", checks.forced),
        DRAFTER: ("text and each round's caches", checks.drafter_run),
        "reuse": ("text after a stop, from the cache", checks.reuse),
        "seeds": ("draws with one seed", sampled.seeds),
        DISTRIBUTION: ("how often tokens are drawn", sampled.distribution),
    }
    if checks.drafter is None:
        del of_one[DRAFTER]
    total, done = len(ids) * (len(of_one) + 1) + 1 - (len(ids) - 1), 0
    plains = []
    for prompt in ids:
        progress(done, total, "plain decoding")
        plains.append(Plain.record(checks.model, prompt, max_tokens))
        done += 1
    found = []
    for name, (what, run) in of_one.items():
        found.append(Check(name, what))
        for i, plain in enumerate(plains if name != DISTRIBUTION else plains[:1]):
            progress(done, total, name)
            run(Place(found[-1], i), plain)
            done += 1
    progress(done, total, BATCH)
    found.append(Check(BATCH, "uneven rows of one batch"))
    neighbours(found[-1], plains, checks)
    progress(total, total, "")
    return found, plains
