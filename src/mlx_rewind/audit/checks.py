"""The checks of one prompt, each a comparison with plain decoding by mlx-lm."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step as plain_step
from mlx_lm.models.cache import make_prompt_cache

from ..cache.round import Round, check
from ..draft.protocol import Drafter, Proposer
from ..generate import generate_step
from .judge import Judge, Place, apart
from .records import FAULT
from .rounding import change
from .runs import Plain, Planned, Walk, accept_lengths, prefilled, spread, wrong
from .state import clone, distances, parts


class Checks:
    """Compares the runs of one model.

    drafter    the user's own, None for none
    """

    def __init__(
        self,
        model: nn.Module,
        judge: Judge,
        vocab_size: int,
        *,
        drafter: Drafter | Proposer | None,
        num_draft_tokens: int,
    ) -> None:
        self.model, self.judge, self.vocab_size = model, judge, vocab_size
        self.drafter, self.num_draft_tokens = drafter, num_draft_tokens

    # -- what rounding does ---------------------------------------------------------------------

    def windows(self, at: Place, plain: Plain) -> None:
        """Feeds plain decoding's text in windows, takes nothing back, and notes how far they are
        from single steps: the noise that all other checks allow for."""
        noise, walk = self.judge.bounds.noise, Walk(self.model, plain)
        cache = prefilled(self.model, plain.prompt)
        text, start = [plain.prompt[-1], *plain.tokens[:-1]], 0
        sizes = cycle([self.num_draft_tokens + 1, *range(2, self.num_draft_tokens + 1)])
        while start < len(text):
            size = min(next(sizes), len(text) - start, self._fitting(cache))
            logits = self._window(cache, text[start : start + size])
            for position in range(start, start + size):
                row = logits[position - start]
                logprobs = row[None] - mx.logsumexp(row[None], keepdims=True)
                at.check.tokens += 1
                distance = apart(logprobs[0], plain, position)
                if distance > self.judge.bounds.cap:
                    detail = f"a window gives logprobs {distance:.1e} away from single steps"
                    at.add(FAULT, position, detail)
                    walk.close()
                    return
                noise.see_logits(distance, change(plain.logits[position], row))
            start += size
            stepped = walk.to(start - 1)
            if walk.tokens != plain.tokens[: len(walk.tokens)]:
                at.check.notes.append(f"prompt {at.prompt}: plain decoding is not repeatable here")
                break
            found = distances(parts(cache), parts(stepped))
            at.check.states += 1
            cap = self.judge.bounds.cap
            beyond = {part: x for part, x in found.items() if x > cap}
            if self.judge.stray(at, start, beyond, "fed token by token"):
                break
            noise.see_state(found)
        walk.close()
        at.check.logprobs, at.check.state = noise.logprobs, noise.state

    # -- what rollback does ---------------------------------------------------------------------

    def tails(self, at: Place, plain: Plain) -> None:
        """Takes two different tails back from the same cache, at every accept length: what is left
        must be the same to the bit on any machine, and as if they had never been fed."""
        walk = Walk(self.model, plain)
        most = self.num_draft_tokens
        lengths = accept_lengths(most)
        for position, accepted in zip(
            spread(len(lengths), len(plain.tokens) - most - 1), lengths, strict=True
        ):
            cache = walk.to(position)
            kept = min(accepted, self._fitting(cache) - 1) + 1
            window = plain.tokens[position : position + self._fitting(cache, most + 1)]
            left = []
            for by in (1, 2):
                tail = [wrong(token, self.vocab_size, by) for token in window[kept:]]
                left.append(self._kept(clone(cache), [*window[:kept], *tail], kept))
            found = distances(parts(left[0]), parts(left[1]))
            beyond = {part: distance for part, distance in found.items() if distance > 0}
            at.check.states += 1
            if self.judge.stray(at, position, beyond, "fed another rejected tail"):
                break
            alone = clone(cache)
            self._window(alone, window[:kept])
            found = distances(parts(left[0]), parts(alone))
            if self.judge.distances(at, position, found, "never fed the rejected tail"):
                break
        walk.close()

    def forced(self, at: Place, plain: Plain) -> None:
        """Speculates with every accept length in turn, and compares the caches after each round."""
        plan = accept_lengths(self.num_draft_tokens)
        accepted = self._speculate(at, plain, self._planned(plain, plan))
        counts = " ".join(str(accepted[length]) for length in range(self.num_draft_tokens + 1))
        at.check.notes.append(f"prompt {at.prompt}: rounds by accepted drafts, from 0 on: {counts}")

    def drafter_run(self, at: Place, plain: Plain) -> None:
        """Speculates with the user's drafter."""
        assert self.drafter is not None
        accepted = self._speculate(at, plain, self.drafter)
        rounds, drafts = accepted.total(), sum(n * count for n, count in accepted.items())
        at.check.notes.append(f"prompt {at.prompt}: {rounds} rounds, {drafts} drafts accepted")

    # -- what a prompt cache carries on ---------------------------------------------------------

    def reuse(self, at: Place, plain: Plain) -> None:
        """Stops in the middle of a block, and goes on from the prompt cache: with mlx-lm itself,
        and speculatively."""
        cache, taken = make_prompt_cache(self.model), len(plain.tokens) // 2
        plan = [self.num_draft_tokens, 0, self.num_draft_tokens]
        steps = self._steps(plain, self._planned(plain, plan), cache)
        for position in range(taken):
            token, logprobs, _ = next(steps)
            if self.judge.token(at, plain, position, token, logprobs):
                steps.close()
                return
        steps.close()
        copy, rest = clone(cache), len(plain.tokens) - taken
        last = [plain.tokens[taken - 1]]
        stock = plain_step(mx.array(last), self.model, max_tokens=rest, prompt_cache=copy)
        pairs: Any = enumerate(stock, taken)
        for position, (token, logprobs) in pairs:
            if self.judge.token(at, plain, position, token, logprobs):
                break
        planned = Planned(plain.tokens[taken:], plan, 1, self.vocab_size)
        more = generate_step(
            last,
            self.model,
            drafter=planned,
            num_draft_tokens=self.num_draft_tokens,
            max_tokens=rest,
            prompt_cache=cache,
        )
        self._follow(at, plain, more, cache, start=taken)

    # -- parts ----------------------------------------------------------------------------------

    def _planned(self, plain: Plain, plan: list[int]) -> Planned:
        return Planned(plain.tokens, plan, len(plain.prompt), self.vocab_size)

    def _steps(self, plain: Plain, drafter: Drafter | Proposer, cache: list[Any]) -> Any:
        return generate_step(
            plain.prompt,
            self.model,
            drafter=drafter,
            num_draft_tokens=self.num_draft_tokens,
            max_tokens=len(plain.tokens),
            prompt_cache=cache,
        )

    def _speculate(self, at: Place, plain: Plain, drafter: Drafter | Proposer) -> Counter[int]:
        cache: list[Any] = make_prompt_cache(self.model)
        return self._follow(at, plain, self._steps(plain, drafter, cache), cache)

    def _follow(
        self, at: Place, plain: Plain, steps: Any, cache: list[Any], start: int = 0
    ) -> Counter[int]:
        """Compares every token, and the caches at the end of every round, with plain decoding.

        Returns how many rounds accepted how many drafts.
        """
        walk, accepted, drafted = Walk(self.model, plain), Counter[int](), 0
        for position, (token, logprobs, from_draft) in enumerate(steps, start):
            if self.judge.token(at, plain, position, token, logprobs):
                break
            drafted += from_draft
            if from_draft:
                continue
            accepted[drafted] += 1
            drafted = 0
            theirs = walk.to(position)
            if walk.tokens != plain.tokens[:position]:
                continue
            if self.judge.state(at, position, cache, theirs):
                break
        steps.close()
        walk.close()
        return accepted

    def _fitting(self, cache: list[Any], size: int | None = None) -> int:
        """The longest window, up to `size`, that a verify may feed to `cache`."""
        plan = check(self.model, cache)
        size = self.num_draft_tokens + 1 if size is None else size
        return size if plan.draft_end is None else max(1, min(size, plan.draft_end - plan.offset))

    def _window(self, cache: list[Any], tokens: list[int]) -> mx.array:
        """Feeds tokens of which none is taken back; returns logits [S, V]."""
        steps = 1 if len(tokens) == 1 else None
        this = Round(self.model, cache, single_steps=steps).open()
        logits = self.model(mx.array([tokens]), cache=cache)
        this.seal()
        this.release()
        return logits[0]

    def _kept(self, cache: list[Any], tokens: list[int], kept: int) -> list[Any]:
        """The cache after a round that fed `tokens` and kept some."""
        with Round(self.model, cache) as this:
            self.model(mx.array([tokens]), cache=cache)
            this.commit(kept)
        return cache
