"""SyntheticDrafter: exactly as often right as it is told, and the answer stays the target's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specdec.config import EngineConfig
from specdec.drafters.synthetic import SyntheticDrafter, _coin
from specdec.drafting import DraftContext
from specdec.errors import UsageError
from specdec.evals.report.intervals import ratio_interval
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request, TokenRecord
from specdec.tree import DraftTree
from tests.server.conftest import RunningServer
from tests.server.real_engine import engine_command, serving_weights
from tests.toy import ALPHABET, run_all, toy_engine, toy_model

RATES = (0.8, 0.6, 0.4)
LENGTH = 40  # of toy answers
WIDE = {"max_running": 64, "token_budget": 1024}  # so wide that no step lacks room for a guess
ENGINE = engine_command(
    "Engine(config, drafter=SyntheticDrafter((1, 1, 0.5), 300))",
    "from specdec.drafters.synthetic import SyntheticDrafter",
)


def drafted(
    rates: Sequence[float],
    answer: Sequence[int],
    output: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (1, 2),
    seed: int = 0,
    **limits: Any,
) -> DraftTree:
    req = Request("r", tuple(prompt), SamplingParams(seed=seed), prediction_ids=tuple(answer))
    req.token_ids += output
    req.output += [TokenRecord(token, ("target",), 0, 0) for token in output]
    (tree,) = SyntheticDrafter(rates, len(ALPHABET)).draft(
        [DecodeStep(req, **{"node_budget": 8, **limits})]
    )
    assert tree.is_chain
    assert tree.token_ids[0] == req.token_ids[-1]
    return tree


def num_right(tree: DraftTree, coming: Sequence[int]) -> int:
    """How far it agrees; wherever it does not, no later guess counts."""
    is_right = [a == b for a, b in zip(tree.token_ids[1:], coming, strict=False)]
    right = (*is_right, False).index(False)
    assert not any(is_right[right:])
    return right


# --- its chains ---


def test_each_position_is_right_in_its_share_of_the_steps() -> None:
    """Seeds and places differ as they do in a run; 20,000 coins, five standard deviations."""
    number = 20_000
    counts: Counter[int] = Counter()
    answer = list(range(20))
    for index in range(number):
        place, seed = index % 16, index // 16
        tree = drafted(RATES, answer, answer[:place], seed=seed)
        assert tree.num_nodes == 4
        counts[num_right(tree, answer[place:])] += 1
    for position, rate in enumerate(RATES):
        found = sum(counts[length] for length in range(position + 1, 4))
        assert abs(found - number * rate) < 5 * math.sqrt(number * rate * (1 - rate))


def test_rates_of_0_and_1_are_never_and_always() -> None:
    answer = list(range(20))
    for seed in range(200):
        assert num_right(drafted((1, 1, 0), answer, seed=seed), answer) == 2


def test_coins_differ_by_seed_place_and_prompt_and_by_nothing_else() -> None:
    def coin(prompt: tuple[int, ...], seed: int, num_output: int, name: str) -> float:
        req = Request(name, prompt, SamplingParams(seed=seed))
        req.token_ids += [5] * num_output
        return _coin(req)

    keys = [(p, s, n) for p in ((1, 2), (2, 1), (3, 3)) for s in (0, 1, 2) for n in range(5)]
    coins = {key: coin(*key, "a") for key in keys}
    assert len(set(coins.values())) == len(keys)
    assert all(0 <= found < 1 for found in coins.values())
    assert coins == {key: coin(*key, "b") for key in keys}
    # Of one seed, as measurements have it, over many prompts of one length: no coin is the other's.
    same_seed = [coin((index // 50, index % 50), 0, 0, "a") for index in range(2000)]
    assert stats.kstest(same_seed, "uniform").pvalue > 1e-4


def test_a_nodes_score_is_that_of_a_child_whose_parent_is_right() -> None:
    answer = list(range(20))
    assert drafted(RATES, answer).scores == pytest.approx((1, 0.8, 0.6 / 0.8, 0.4 / 0.6))
    assert drafted((0.5, 0, 0), answer).scores == (1, 0.5, 0, 0)
    assert drafted(RATES, answer).sources[1:] == (("synthetic",),) * 3


def test_chains_are_no_longer_than_allowed_or_known() -> None:
    answer = list(range(10))
    assert drafted(RATES, answer, node_budget=2).num_nodes == 3
    assert drafted(RATES, answer, node_budget=0).num_nodes == 1
    assert drafted(RATES, answer, max_depth=1).num_nodes == 2
    assert drafted(RATES, answer, answer[:8]).num_nodes == 3
    assert drafted(RATES, answer, answer).num_nodes == 1


def test_without_the_answer_it_drafts_nothing() -> None:
    assert drafted(RATES, []) == DraftTree.root_only(2)
    departed = drafted(RATES, range(10), [0, 1, 7])
    assert departed == DraftTree.root_only(7)


@pytest.mark.parametrize(
    "rates",
    [None, "", "x", "0.8:", "0.8:x", "0.5:0.6", "1.1", "-0.1", "nan", "0.5:nan", "inf", "0.8,0.6"],
)
def test_wrong_rates_are_refused_in_one_line(rates: str | None) -> None:
    with pytest.raises(UsageError, match=r"^synthetic needs a share per position.*$"):
        SyntheticDrafter.load(DraftContext(toy_model(), EngineConfig(), rates))


def test_it_is_found_by_its_name() -> None:
    engine = toy_engine(drafter_name="synthetic=0.8:0.6:0.6:0")
    drafter: Any = engine.drafter.drafters[0]
    assert type(drafter).__name__ == "SyntheticDrafter"
    assert drafter._rates == (0.8, 0.6, 0.6, 0)
    assert drafter._vocab_size == len(ALPHABET)


# --- with the engine ---


def toy_requests(
    number: int, answers: Sequence[Sequence[int]] = (), **params: Any
) -> list[Request]:
    """Of one seed, as measurements have them, with prompts of their own."""
    params = {"max_tokens": LENGTH, "ignore_eos": True, "seed": 0, **params}
    return [
        Request(
            f"r{index}",
            (index % 23, index // 23 % 23, index // 529),
            SamplingParams(**params),
            prediction_ids=tuple(answers[index]) if answers else (),
            keeps_steps=True,
        )
        for index in range(number)
    ]


def answered(requests: list[Request], drafter: SyntheticDrafter | None, **settings: Any) -> Any:
    run_all(toy_engine(drafter=drafter, **settings), requests)
    return [list(req.output_ids) for req in requests]


def synthetic(rates: Sequence[float] = RATES) -> SyntheticDrafter:
    return SyntheticDrafter(rates, len(ALPHABET))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("is_edited", [False, True])
def test_answers_are_those_of_plain_decoding(temperature: float, is_edited: bool) -> None:
    plain = answered(toy_requests(12, temperature=temperature), None)
    guesses = [[*answer[:9], answer[9] + 1, *answer[10:]] for answer in plain]
    found = toy_requests(12, guesses if is_edited else plain, temperature=temperature)
    assert answered(found, synthetic()) == plain
    for req in found:
        assert req.stats.num_accepted > 0
        assert all(record.verified for record in req.steps[:-1]) != is_edited


def test_with_the_rejection_rule_the_distribution_is_the_targets() -> None:
    """The first two tokens of 1,000 seeds, against those of plain decoding (chi-squared)."""

    def pairs(offset: int, drafter: SyntheticDrafter | None) -> Counter[tuple[int, ...]]:
        requests = [
            Request(
                f"r{seed}",
                (1, 2, 3),
                SamplingParams(max_tokens=2, temperature=1.0, seed=offset + seed, ignore_eos=True),
                prediction_ids=(likely, 7),
            )
            for seed in range(1000)
        ]
        settings = {"verification": "rejection", **WIDE}
        return Counter(tuple(out[:2]) for out in answered(requests, drafter, **settings))

    likely = 0
    plain = pairs(0, None)
    likely = Counter(first for first, _ in plain.elements()).most_common(1)[0][0]
    drafted_pairs = pairs(10_000, synthetic((0.7,)))
    common = [pair for pair in plain if plain[pair] + drafted_pairs[pair] >= 10]
    table = [[counts[pair] for pair in common] for counts in (plain, drafted_pairs)]
    rest = [1000 - sum(row) for row in table]
    table = [[*row, left] for row, left in zip(table, rest, strict=True)]
    assert len(common) > 5
    assert stats.chi2_contingency(table).pvalue > 1e-4


# --- the process that it makes ---


def lengths_of(coins: Iterator[float], rates: Sequence[float], length: int) -> list[int]:
    """Tokens of each step of an answer that is guessed to its end, of which the last is cut."""
    found: list[int] = []
    while (left := length - sum(found)) > 0:
        coin = next(coins)
        found.append(min(left, 1 + sum(coin < rate for rate in rates)))
    return found


def steps_moments(length: int, rates: Sequence[float]) -> tuple[float, float]:
    """Mean and variance of the number of steps of such an answer, exactly."""
    bounds = (1.0, *rates, 0.0)
    shares = [bounds[i] - bounds[i + 1] for i in range(len(rates) + 1)]  # of accepted lengths
    means, squares = [0.0], [0.0]
    for left in range(1, length + 1):
        behind = [max(0, left - 1 - accepted) for accepted in range(len(shares))]
        means.append(1 + sum(p * means[b] for p, b in zip(shares, behind, strict=True)))
        squares.append(
            1 + sum(p * (2 * means[b] + squares[b]) for p, b in zip(shares, behind, strict=True))
        )
    return means[-1], squares[-1] - means[-1] ** 2


def coins_of(req: Request, begun: Sequence[int]) -> Iterator[float]:
    """Those of a request's steps, which begin behind so many tokens."""
    fresh = Request("coins", req.prompt_ids, req.params)
    for num_output in begun:
        fresh.token_ids = [*req.prompt_ids, *[0] * num_output]
        yield _coin(fresh)


def test_tokens_per_step_are_1_and_the_sum_of_the_rates() -> None:
    """Over many toy requests: of whole steps as it is, and with what answers' ends cut, exactly.

    The same requests tie the simulation below to the engine, step by step.
    """
    number = 120
    plain = answered(toy_requests(number), None, **WIDE)
    found = toy_requests(number, plain)
    assert answered(found, synthetic(), **WIDE) == plain
    whole: list[int] = []
    for req in found:
        lengths = [record.num_tokens for record in req.steps]
        begun = [0, *accumulate(lengths[:-1])]
        assert lengths_of(coins_of(req, begun), RATES, LENGTH) == lengths
        whole += [n for n, at in zip(lengths, begun, strict=True) if LENGTH - at > len(RATES)]
    # Whether a step is whole is known before its coin: the coins are those of independent steps.
    accepted = [0, *RATES]
    variance = sum((2 * i - 1) * rate for i, rate in enumerate(accepted)) - sum(RATES) ** 2
    assert abs(np.mean(whole) - (1 + sum(RATES))) < 5 * math.sqrt(variance / len(whole))
    mean, spread = steps_moments(LENGTH, RATES)
    total = sum(len(req.steps) for req in found)
    assert abs(total - number * mean) < 5 * math.sqrt(number * spread)


def test_intervals_over_such_requests_hold_the_truth() -> None:
    """1,000 runs of 20 answers of different lengths; the truth is exact, ends included."""
    choices = (20, 60, 128)
    truth = sum(choices) / sum(steps_moments(length, RATES)[0] for length in choices)
    rng = np.random.default_rng(11)
    num_held = 0
    for run in range(1000):
        tokens = rng.choice(choices, 20)
        coins = iter(rng.random(int(tokens.sum())))
        steps = [len(lengths_of(coins, RATES, length)) for length in tokens]
        interval = ratio_interval(tokens, steps, seed=run)
        assert interval is not None and interval.low is not None and interval.high is not None
        num_held += interval.low <= truth <= interval.high
    assert 930 <= num_held <= 970


# --- over HTTP ---


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving_weights(tmp_path_factory.mktemp("weights"), ENGINE) as running:
        yield running


def test_text_that_comes_back_is_enough_over_http(server: RunningServer) -> None:
    """A byte is a token, so the text has the answer's tokens; two guesses of three are right."""
    fields: dict[str, Any] = {
        "model": "toy",
        "messages": [{"role": "user", "content": "abcabc"}],
        "max_tokens": 60,
        "temperature": 1,
        "seed": 5,
        "extra_body": {"allowed_token_ids": list(range(94))},  # printable
    }
    create = server.client.chat.completions.create
    plain = create(**fields)
    text = plain.choices[0].message.content
    answer = create(**fields, prediction={"type": "content", "content": text})
    assert answer.choices == plain.choices
    assert plain.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    counts = answer.metrics["speculative_decoding"]
    histogram = counts["acceptance_histogram"]
    assert sum(histogram[:2]) <= 1, "only the last step can have fewer than two"
    assert histogram[2] > 3 and histogram[3] > 3
    assert set(counts["accepted_by_source"]) == {"synthetic"}
