"""The chi-square test, in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) of the chi-square distribution.

    Q(1/2, h) = erfc(sqrt h), Q(1, h) = exp(-h), Q(a + 1, h) = Q(a, h) + h^a exp(-h) / Gamma(a + 1)
    with a = freedom / 2 and h = statistic / 2: Abramowitz and Stegun, 26.4.19 and 6.5.22.
    """
    half = statistic / 2
    if half <= 0:
        return 1.0
    shape, tail = (0.5, math.erfc(math.sqrt(half))) if freedom % 2 else (1.0, math.exp(-half))
    while shape < freedom / 2:
        tail += math.exp(shape * math.log(half) - half - math.lgamma(shape + 1))
        shape += 1
    return tail


def pooled(expected: Sequence[float], least: float = 5.0) -> list[list[int]]:
    """Outcomes in bins of at least `least` expected draws each, in the order of their chances."""
    bins: list[list[int]] = []
    filling: list[int] = []
    held = 0.0
    for i in sorted(range(len(expected)), key=lambda i: -expected[i]):
        filling.append(i)
        held += expected[i]
        if held >= least:
            bins.append(filling)
            filling, held = [], 0.0
    if not bins:
        return [filling]
    bins[-1] += filling
    return bins


def goodness_of_fit(counts: Sequence[int], chances: Sequence[float]) -> tuple[float, int]:
    """Chance that draws of this law differ from it at least as much, and the number of bins.

    counts    how often each outcome was drawn
    chances   its probability under the law; they sum to 1
    """
    draws = sum(counts)
    bins = pooled([draws * chance for chance in chances])
    statistic = 0.0
    for members in bins:
        expected = draws * sum(chances[i] for i in members)
        observed = sum(counts[i] for i in members)
        statistic += (observed - expected) ** 2 / expected if expected else 0.0
    if len(bins) < 2:
        return 1.0, len(bins)
    return chi_square_tail(statistic, len(bins) - 1), len(bins)
