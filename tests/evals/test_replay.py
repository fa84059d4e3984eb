"""`specdec eval replay` against live runs: the same steps of the same drafters, one by one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec import native_choice
from specdec.composite import CompositeDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.prediction import PredictionDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.drafters.suffix_pool import SuffixPool
from specdec.drafters.synthetic import SyntheticDrafter
from specdec.drafting import Drafter
from specdec.engine import Engine
from specdec.evals.replay.engine import ReplayEngine
from specdec.generation import generate
from specdec.kernels import native_library
from specdec.limits import SpeculationLimits
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.step_record import StepRecord
from specdec.tree import DraftTree
from tests.toy import ALPHABET, compiled_native, toy_engine, toy_model

CONTEXT = toy_model().max_model_len
SIZE = len(ALPHABET)


@dataclass(frozen=True)
class Ask:
    """A request of a run."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    speculation: SpeculationLimits
    num_wrong: int  # of the predicted text's tokens, from the front


@dataclass(frozen=True)
class Run:
    """Requests in order, and who guesses."""

    drafters: tuple[str, ...]
    node_budget: int
    token_budget: int
    prefix_cache: bool
    is_native: bool
    asks: tuple[Ask, ...]


def make(names: tuple[str, ...], *, uses_noise: bool = True) -> Drafter:
    """Drafters without a past; the pool's key is the same, so that it drops the same texts."""
    known: dict[str, Drafter] = {
        "ngram": NgramDrafter(),
        "suffix": SuffixDrafter(),
        "pool": SuffixDrafter(SuffixPool(vocab_size=SIZE, max_bytes=40_000, key=b"k" * 16)),
        "prediction": PredictionDrafter(),
        "synthetic": SyntheticDrafter((0.9, 0.7, 0.5, 0.5, 0.2), SIZE),
    }
    chosen = [known[name] for name in names]
    for drafter in chosen:
        drafter.uses_noise = uses_noise
    return CompositeDrafter(chosen, vocab_size=SIZE)


DRAFTERS = (
    ("ngram",),
    ("suffix",),
    ("pool",),
    ("prediction",),
    ("synthetic",),
    ("prediction", "suffix"),
    ("prediction", "synthetic"),
    ("ngram", "pool", "prediction"),
    ("suffix", "ngram", "synthetic"),
)


def random_prompt(rng: random.Random) -> tuple[int, ...]:
    """Of few letters or repeated, so that there is something to look up; some fill the context."""
    kind = rng.randrange(4)
    if kind == 0:
        return tuple(rng.randrange(4) for _ in range(rng.randint(1, 60)))
    if kind == 3:
        return tuple([0, 1, 2, 3] * CONTEXT)[: CONTEXT - rng.randint(1, 20)]
    part = [rng.randrange(SIZE) for _ in range(rng.randint(1, 12))]
    return tuple(part * rng.randint(1, 9))


def random_ask(rng: random.Random) -> Ask:
    choose = rng.choice
    params = SamplingParams(
        max_tokens=choose((1, 2, 9, 20, 40, 40, 40)),
        temperature=choose((0.0, 0.0, 0.3, 0.8, 1.0)),
        seed=rng.getrandbits(32),
        top_k=choose((0, 3)),
        repetition_penalty=choose((1.0, 1.0, 1.3)),
        logit_bias=choose(({}, {}, {0: 9.0, 1: 9.0}, {2: 30.0})),  # repeats itself
        ignore_eos=choose((True, False)),
        stop=choose(((), (), ("ab",), ("cccc", "bba"))),
        stop_token_ids=choose((frozenset[int](), frozenset({3, 9, 15}))),
    )
    speculation = SpeculationLimits(
        max_nodes=choose((*[None] * 8, 0, 1, 5)),
        max_depth=choose((*[None] * 4, 1, 2, 4)),
        drafters=choose((*[None] * 8, ("suffix", "synthetic"), ("ngram", "prediction"))),
    )
    return Ask(random_prompt(rng), params, speculation, choose((0, 0, 1, 5)))


def random_run(seed: int) -> Run:
    """Drawn from one seed: drawn choice by choice, hypothesis varies too few of them at a time."""
    rng = random.Random(seed)
    return Run(
        drafters=rng.choice(DRAFTERS),
        node_budget=rng.choice((0, 1, 2, 4, 7, 7, 16, 16, 32, 32)),
        token_budget=rng.choice((1, 8, 32, 256)),
        prefix_cache=rng.choice((True, False)),
        is_native=rng.choice((True, False)),
        asks=tuple(random_ask(rng) for _ in range(rng.randint(1, 3))),
    )


runs = st.integers(0, 2**32).map(random_run)


def said(ask: Ask, num_behind: int) -> tuple[int, ...]:
    """What the target says, whatever ends the request, and so much behind the longest answer."""
    longer = replace(
        ask.params,
        max_tokens=ask.params.max_tokens + num_behind,
        ignore_eos=True,
        stop=(),
        stop_token_ids=frozenset(),
    )
    return generate(plain_engine(), ask.prompt_ids, longer).token_ids


@cache
def plain_engine() -> Engine:
    return toy_engine()


def predicted(ask: Ask, truth: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((token + (at < ask.num_wrong)) % SIZE for at, token in enumerate(truth))


def live(run: Run, truths: list[tuple[int, ...]]) -> list[tuple[StepRecord, ...]]:
    engine = toy_engine(
        drafter=make(run.drafters),
        node_budget=run.node_budget,
        token_budget=run.token_budget,
        prefix_cache=run.prefix_cache,
    )
    found = []
    for ask, truth in zip(run.asks, truths, strict=True):
        answer = generate(
            engine,
            ask.prompt_ids,
            ask.params,
            prediction_ids=predicted(ask, truth),
            speculation=ask.speculation,
            keeps_steps=True,
        )
        assert answer.token_ids == truth[: len(answer.tokens)]
        found.append(answer.steps)
    return found


def replayed(
    run: Run,
    truths: list[tuple[int, ...]],
    known: list[tuple[int, ...]],
    *,
    uses_noise: bool = True,
) -> list[tuple[StepRecord, ...]]:
    config = replace(
        plain_engine().config,
        node_budget=run.node_budget,
        token_budget=run.token_budget,
        prefix_cache=run.prefix_cache,
    )
    engine = ReplayEngine(config, toy_model(), make(run.drafters, uses_noise=uses_noise))
    found = []
    for number, (ask, truth, output_ids) in enumerate(zip(run.asks, truths, known, strict=True)):
        request = Request(
            f"replayed {number}",
            ask.prompt_ids,
            ask.params,
            prediction_ids=predicted(ask, truth),
            speculation=ask.speculation,
        )
        found.append(engine.replay(request, output_ids))
    return found


@pytest.fixture(autouse=True)
def _same_chooser_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_choice, "_native", None)


def check(run: Run) -> list[StepRecord]:
    """The steps of a run, live and replayed; what chooses among too many nodes is either kind."""
    library = native_library.compiled(compiled_native()) if run.is_native else None
    native_choice.use_native(library)
    truths = [said(ask, run.node_budget + 1) for ask in run.asks]
    want = live(run, truths)
    assert replayed(run, truths, truths) == want
    assert replayed(run, truths, truths, uses_noise=False) == want  # model-free ones do not look
    return list(chain.from_iterable(want))


@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
@given(runs)
def test_a_replay_takes_the_steps_of_the_live_run(run: Run) -> None:
    check(run)


def test_it_does_so_where_steps_are_of_all_kinds() -> None:
    met: Counter[str] = Counter()
    for seed in range(1000, 1025):
        for step in check(random_run(seed)):
            met["nodes were left out"] += step.offered != step.verified
            met["a stop or the length cut"] += step.num_cut > 0
            met["several were accepted"] += step.num_accepted > 2
            met["some were rejected"] += 0 < step.num_accepted < len(step.verified)
            met["two drafters were right"] += len(step.accepted_by) > 1
    assert len(met) == 5 and min(met.values()) > 1, met


def known_part(steps: tuple[StepRecord, ...]) -> list[object]:
    """What can be told of live steps from the tokens that became output."""
    last = steps[-1]
    if last.num_accepted == last.num_tokens:  # the walk came to the end of the output
        last = replace(last, num_evaluated=last.num_accepted, num_cut=0, evaluated_by={})
    return [*steps[:-1], last]


@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
@given(runs)
def test_the_end_of_a_recording_is_not_guessed(run: Run) -> None:
    """Only the output is known: no step differs but for what stands behind its end."""
    run = replace(run, asks=run.asks[:1])
    truths = [said(ask, run.node_budget + 1) for ask in run.asks]
    (want,) = live(run, truths)
    num_tokens = sum(step.num_tokens for step in want)
    (found,) = replayed(run, truths, [truths[0][:num_tokens]])
    assert known_part(found) == known_part(want)
    assert found[-1].num_cut == 0


class Known(Drafter):
    """Drafts one tree: 1 or 2, after 1 comes 3 or 4, after 3 comes 5."""

    name = "known"

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        names = (self.name,)
        return [
            DraftTree(
                (step.root, 1, 3, 5, 4, 2),
                (-1, 0, 1, 2, 1, 0),
                (1.0,) * 6,
                (("target",), *[names] * 5),
            )
            if step.node_budget >= 5
            else DraftTree.root_only(step.root)
            for step in steps
        ]


@pytest.mark.parametrize(
    ("output_ids", "num_evaluated", "num_accepted", "num_cut", "num_judged"),
    [
        ((9, 0), 1, 0, 0, 2),  # wrong at once
        ((1, 3), 2, 2, 0, 4),  # nothing is known of what follows 3
        ((1, 3, 5), 3, 2, 1, 5),  # 5 is known to be right, and cut off
        ((1, 3, 9), 3, 2, 0, 5),  # 5 is known to be wrong
        ((1, 4), 2, 2, 0, 4),  # nothing was guessed behind 4
        ((1, 9), 2, 1, 0, 4),
        ((2, 9), 1, 1, 0, 2),
    ],
)
def test_what_stands_behind_the_end_counts_if_it_is_known(
    output_ids: tuple[int, ...],
    num_evaluated: int,
    num_accepted: int,
    num_cut: int,
    num_judged: int,
) -> None:
    engine = ReplayEngine(plain_engine().config, toy_model(), Known())
    request = Request("one", (7, 8), SamplingParams(max_tokens=2))
    first = engine.replay(request, output_ids)[0]
    assert (first.num_evaluated, first.num_accepted) == (num_evaluated, num_accepted)
    assert first.num_cut == num_cut and first.verified == (2, 2, 1)
    assert first.evaluated_by == {"known": num_judged}
    assert request.output_ids == list(output_ids[:2])
    in_first = first.num_tokens
    assert [token.step for token in request.output] == [0] * in_first + [1] * (2 - in_first)
