"""What an audit found."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Kinds of difference.
NEAR_TIE, FAULT = "near-tie", "fault"


@dataclass(frozen=True)
class Difference:
    """Where speculative decoding is not plain decoding.

    kind                near-tie: rounding explains it; fault: it does not
    check               the check that found it
    prompt, position    index of the prompt, and tokens that were emitted before
    detail              what was got and what was expected, in one line
    plain, speculative  the two candidates, token ids; None where the tokens are equal
    gap                 how far apart plain decoding has these two, in units in the last place of
                        the logits' dtype, noise of a draw included; None where the tokens are
                        equal, and for draws by a sampler whose noise is not known
    bound               the largest gap that rounding explains, in the same units
    layer, slot         the cache that differs: its index, with that of the child of a `CacheList`,
                        and what of it; None where no state was compared, or all of it is equal
    """

    kind: str
    check: str
    prompt: int
    position: int
    detail: str
    plain: int | None = None
    speculative: int | None = None
    gap: float | None = None
    bound: float | None = None
    layer: str | None = None
    slot: str | None = None


@dataclass
class Check:
    """One check over all prompts.

    tokens, states    compared: emitted tokens with their logprobs; prompt caches
    logprobs          largest difference of a logprob, over the largest logit of its row
    state             largest difference of a number in a cache, over the largest in its array
    notes             what else is to be known
    """

    name: str
    what: str
    tokens: int = 0
    states: int = 0
    logprobs: float = 0.0
    state: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """equal, rounding, near-ties or fault."""
        kinds = {difference.kind for difference in self.differences}
        if FAULT in kinds:
            return "fault"
        if NEAR_TIE in kinds:
            return "near-ties"
        return "rounding" if self.logprobs or self.state else "equal"


@dataclass(frozen=True)
class Report:
    """The outcome of an audit.

    exactness       the level that runs of this model promise here (docs/exactness.md)
    logits_dtype    the dtype whose last place gaps are counted in
    gap_bound       candidates closer than this may change places by rounding, in these units
    prompts         prompts audited
    checks          in the order in which they ran
    """

    exactness: str
    device: str
    logits_dtype: str
    gap_bound: float
    prompts: int
    max_tokens: int
    num_draft_tokens: int
    draft_kind: str
    seed: int
    checks: list[Check]

    @property
    def differences(self) -> list[Difference]:
        return [difference for check in self.checks for difference in check.differences]

    @property
    def verdict(self) -> str:
        """exact: every token equal. near-ties: not every one, and rounding explains it. fault."""
        kinds = {difference.kind for difference in self.differences}
        return "fault" if FAULT in kinds else "near-ties" if NEAR_TIE in kinds else "exact"

    @property
    def tokens(self) -> int:
        return sum(check.tokens for check in self.checks)

    @property
    def states(self) -> int:
        return sum(check.states for check in self.checks)

    @property
    def is_bitwise(self) -> bool:
        """Whether every number that was compared is equal to the bit."""
        return all(check.result == "equal" for check in self.checks)

    @property
    def line(self) -> str:
        """The verdict in one line."""
        compared = f"{self.tokens:,} tokens and {self.states:,} cache states compared"
        if self.verdict == "exact":
            how = "every number equal to the bit"
            if not self.is_bitwise:
                how = f"numbers equal to {self._largest:.1e}"
            return f"exact: {compared}, every token equal, {how}"
        kinds = [difference.kind for difference in self.differences]
        faults, ties = kinds.count(FAULT), kinds.count(NEAR_TIE)
        if not faults:
            return f"near-ties: {compared}, {ties} left plain decoding at a near-tie, no fault"
        places = [d for d in self.differences if d.kind == FAULT]
        first = next((d for d in places if d.layer is not None), places[0])
        where = f" in layer {first.layer}, {first.slot}" if first.layer is not None else ""
        more = f", and {ties} near-ties" if ties else ""
        return f"FAULT{where}: {compared}, {faults} that rounding does not explain{more}"

    @property
    def _largest(self) -> float:
        return max(max(check.logprobs, check.state) for check in self.checks)
