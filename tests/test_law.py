"""The laws that the acceptance rules keep: exact joint laws of three tokens against 4,000 draws."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

import zoo
from mlx_rewind import DraftModel, Engine, NGram, Request, SamplingParams
from mlx_rewind.accept import block, rejection
from mlx_rewind.sampling import Acceptance, Draws, draw, gumbel, laws

V, LENGTH, DRAWS = 5, 3, 4000
PROMPT = [1, 2, 1, 2, 3, 1]
RULES: dict[str, Callable[..., mx.array]] = {"rejection": rejection, "block": block}
SETTINGS = {
    "T=1": SamplingParams(temperature=1.0, seed=0),
    "T=0.5": SamplingParams(temperature=0.5, seed=0),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8, seed=0),
    "top-k": SamplingParams(temperature=1.0, top_k=2, seed=0),
    "min-p": SamplingParams(temperature=1.0, min_p=0.1, seed=0),
}


@functools.cache
def model(seed: int) -> Any:
    """A hybrid of one recurrent and one attention layer, flat enough that drafts may be wrong."""
    return zoo.build("qwen3_5", seed, spread=1.0, vocab_size=V, num_hidden_layers=2,
                     full_attention_interval=2)  # fmt: skip


@functools.cache
def table(seed: int, setting: str) -> list[mx.array]:
    """[i]: log-laws [V**i, V] after every i tokens, the first of them the slowest to change."""
    rows = []
    for i in range(LENGTH):
        prefixes = [[*PROMPT, *tail] for tail in itertools.product(range(V), repeat=i)]
        logits = model(seed)(mx.array(prefixes))[:, -1].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        own = Draws(SETTINGS[setting], 0)
        law = laws([(own, 0)] * len(prefixes), logprobs)
        rows.append(law - mx.logsumexp(law, axis=-1, keepdims=True))
    return rows


def joint(setting: str) -> list[float]:
    """The exact law of the first three tokens, [V**3]."""
    p = [mx.exp(rows) for rows in table(0, setting)]
    after_two = (p[0][:, :, None] * p[1].reshape(1, V, V)).reshape(-1)
    law: Any = (after_two[:, None] * p[2]).reshape(-1).tolist()
    return law


def assert_follows(outcomes: list[int], law: list[float]) -> None:
    """Chi-square at p = 0.001; outcomes that are expected fewer than five times are one."""
    assert abs(sum(law) - 1) < 1e-4
    counts = [0] * len(law)
    for outcome in outcomes:
        counts[outcome] += 1
    pairs, rare = [], [0.0, 0.0]
    for count, share in zip(counts, law, strict=True):
        expected = share * len(outcomes)
        if expected == 0:
            assert count == 0
        elif expected < 5:
            rare = [rare[0] + count, rare[1] + expected]
        else:
            pairs.append((count, expected))
    if rare[1] >= 1:
        pairs.append((rare[0], rare[1]))  # type: ignore[arg-type]
    k = len(pairs) - 1
    assert k >= 2
    statistic = sum((count - expected) ** 2 / expected for count, expected in pairs)
    # Wilson and Hilferty's approximation of the quantile; 3.09 is that of the normal law.
    limit = k * (1 - 2 / (9 * k) + 3.09 * math.sqrt(2 / (9 * k))) ** 3
    assert statistic < limit, (statistic, limit)


class Simulation:
    """Rounds of many rows at once, by the tables: the rules and nothing else of the product."""

    def __init__(self, rule: str, setting: str, drafter: str) -> None:
        mx.random.seed(7)
        self.rule, self.drafter = RULES[rule], drafter
        self.p, self.q = table(0, setting), table(3, setting)
        self.first_accepted: mx.array | None = None

    def run(self) -> list[int]:
        """Index of the three tokens of every row."""
        done: list[mx.array] = []
        waiting = {0: mx.zeros((DRAWS,), mx.int32)}  # tokens so far -> index of the rows' prefixes
        for length in range(LENGTH):
            prefixes = waiting.pop(length, None)
            if prefixes is None or not prefixes.size:
                continue
            for size, reached in self._round(length, prefixes).items():
                if size == LENGTH:
                    done.append(reached)
                else:
                    before = waiting.get(size)
                    waiting[size] = reached if before is None else mx.concatenate([before, reached])
        outcomes: Any = mx.concatenate(done).tolist()
        assert len(outcomes) == DRAWS
        return outcomes

    def _round(self, length: int, prefixes: mx.array) -> dict[int, mx.array]:
        """One round of rows with `length` tokens: by their new length, what they have then."""
        count, rows = LENGTH - length - 1, prefixes.size
        at, guesses, theirs, ours = prefixes, [], [], [self.p[length][prefixes]]
        for i in range(count):
            q = self.q[length + i][at]
            guess = mx.random.categorical(q) if self.drafter == "model" else self._certain(at)
            at = at * V + guess.astype(mx.int32)
            guesses.append(guess)
            theirs.append(q)
            ours.append(self.p[length + i + 1][at])
        if not count:
            token = mx.random.categorical(ours[0])
            return {length + 1: prefixes * V + token.astype(mx.int32)}
        given = [
            mx.stack(ours, axis=1),
            mx.stack(guesses, axis=1),
            mx.random.uniform(shape=(rows, count)),
            mx.random.gumbel((rows, count + 1, V)),
        ]
        law = [mx.stack(theirs, axis=1)] if self.drafter == "model" else []
        result: Any = mx.vmap(self.rule)(*given, *law)
        accepted = result[:, 0]
        if length == 0:
            self.first_accepted = accepted
        reached: dict[int, mx.array] = {}
        counts: Any = accepted.tolist()
        for n in range(count + 1):
            rows_of = mx.array([b for b, have in enumerate(counts) if have == n], mx.int32)
            index = prefixes[rows_of]
            for guess in guesses[:n]:
                index = index * V + guess[rows_of].astype(mx.int32)
            if rows_of.size:
                reached[length + n + 1] = index * V + result[rows_of, 1 + n]
        return reached

    @staticmethod
    def _certain(at: mx.array) -> mx.array:
        return (at * 3 + 2) % V


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_keeps_the_joint_law(rule: str, setting: str, drafter: str) -> None:
    assert_follows(Simulation(rule, setting, drafter).run(), joint(setting))


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_first_draft_token_is_accepted_as_often_as_it_can_be(
    setting: str, drafter: str
) -> None:
    """Within three sigma of the sum of min(p, q)."""
    simulation = Simulation("rejection", setting, drafter)
    simulation.run()
    p, q = mx.exp(simulation.p[0][0]), mx.exp(simulation.q[0][0])
    if drafter == "ngram":
        q = (mx.arange(V) == Simulation._certain(mx.array(0))).astype(mx.float32)
    share = float(mx.minimum(p, q).sum().item())
    assert simulation.first_accepted is not None
    measured = float((simulation.first_accepted > 0).mean().item())
    assert abs(measured - share) <= 3 * math.sqrt(share * (1 - share) / DRAWS) + 1e-6


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_blocks_accept_no_less(setting: str, drafter: str) -> None:
    means = {}
    for rule in RULES:
        simulation = Simulation(rule, setting, drafter)
        simulation.run()
        assert simulation.first_accepted is not None
        means[rule] = float(simulation.first_accepted.mean().item())
    # Of two means of 4,000 counts within 0..2, three sigma of the difference are below 0.06.
    assert means["block"] >= means["rejection"] - 0.06


@pytest.mark.parametrize("setting", SETTINGS)
def test_keyed_draws_follow_the_law(setting: str) -> None:
    """4,000 seeds at three positions each, by the product's own draws."""
    rows = [Draws(dataclasses.replace(SETTINGS[setting], seed=seed), 6) for seed in range(DRAWS)]
    prefixes = mx.zeros((DRAWS,), mx.int32)
    for i, law in enumerate(table(0, setting)):
        plain = [Draws(SamplingParams(temperature=1.0, seed=own.seed), 6) for own in rows]
        tokens, _ = draw([(own, 6 + i) for own in plain], law[prefixes])
        prefixes = prefixes * V + tokens.astype(mx.int32)
    outcomes: Any = prefixes.tolist()
    assert_follows(outcomes, joint(setting))


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("acceptance", ["match", "rejection", "block"])
def test_requests_follow_the_law(acceptance: Acceptance, drafter: str) -> None:
    """The whole way: drafts, noise, rounds and rows of an engine."""
    count = 300
    engine = Engine(model(0), max_rows=25, prefill_step_size=500, max_draft_tokens=2)
    guesses = DraftModel(model(3)) if drafter == "model" else NGram(1, 3)
    handles = [
        engine.submit(
            Request(
                PROMPT,
                max_tokens=LENGTH,
                drafter=guesses,
                num_draft_tokens=2,
                sampling=SamplingParams(temperature=1.0, top_p=0.8, seed=seed),
                acceptance=acceptance,
            )
        )
        for seed in range(count)
    ]
    for _ in engine:
        pass
    outcomes = [functools.reduce(lambda index, t: index * V + t, h.tokens, 0) for h in handles]
    assert_follows(outcomes, joint("top-p"))
    assert sum(handle.stats.accepted for handle in handles) > count / 10


def test_noise_is_gumbel_noise() -> None:
    own = Draws(SamplingParams(temperature=1.0, seed=3), 0)
    noise = gumbel([own.key("token", i) for i in range(200)], 100)
    assert abs(float(noise.mean().item()) - 0.5772) < 0.03
    assert abs(float(noise.var().item()) - math.pi**2 / 6) < 0.08
