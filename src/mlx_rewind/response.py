"""What `stream_generate` yields."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_lm.generate import GenerationResponse as PlainResponse


@dataclass
class GenerationResponse(PlainResponse):
    """mlx-lm's response, and what speculation did so far.

    draft_kind                  none, model, ngram, prediction or custom
    draft_rounds                verifies with at least one draft token
    draft_n, draft_n_accepted   draft tokens proposed, and emitted
    mean_acceptance_length      tokens per forward of the target
    draft_n_per_position, draft_n_accepted_per_position
                                the same by position in the window
    exactness                   bitwise, token, near-tie or law (docs/exactness.md)
    draft_rechecks              rounds that were cut before a near-tie, see `recheck`
    seed                        the seed of the draws, None without `sampling`
    draft_reason                why `Auto` does what it does, empty for another drafter
    cached_tokens               prompt tokens that a store had, and that were not read again
    top_logprobs                the best (id, logprob) of this position, if `sampling` asks for them
    """

    draft_kind: str = "none"
    draft_rounds: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    mean_acceptance_length: float = 0.0
    draft_n_per_position: list[int] = field(default_factory=list)
    draft_n_accepted_per_position: list[int] = field(default_factory=list)
    exactness: str = "bitwise"
    draft_rechecks: int = 0
    seed: int | None = None
    draft_reason: str = ""
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the draft tokens at position i that were emitted."""
        pairs = zip(self.draft_n_accepted_per_position, self.draft_n_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]
