"""The toy model, on which equality rests: answers end both ways, and branches are accepted."""

from __future__ import annotations

import pytest

from specdec.params import SamplingParams
from specdec.request import Request
from tests.toy import ALPHABET, TruthDrafter, run_all, toy_engine

pytestmark = pytest.mark.usefixtures("backend")


def test_branches_are_accepted_and_moved() -> None:
    """Equality means little unless drafts are accepted off the first path."""

    def request() -> Request:
        return Request("r0", (1, 2, 3), SamplingParams(max_tokens=40, ignore_eos=True))

    plain, drafted = request(), request()
    run_all(toy_engine(), [plain])
    truth = tuple(plain.output_ids)
    engine = toy_engine(drafter=TruthDrafter({"r0": truth}, 3, hit_rate=0.8), node_budget=30)
    moves: list[int] = []
    move = engine.runner.kv_cache.move
    engine.runner.kv_cache.move = lambda src, dst: (moves.append(len(src)), move(src, dst))[1]  # type: ignore[func-returns-value, method-assign]  # to see what the engine does
    run_all(engine, [drafted])
    assert tuple(drafted.output_ids) == truth
    assert drafted.stats.tokens_per_step > 2
    assert len(moves) > 3


def test_some_requests_end_by_themselves() -> None:
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=token) for token in range(len(ALPHABET))
    ]
    requests = [Request(f"r{token}", (token,), own) for token, own in enumerate(params)]
    run_all(toy_engine(), requests)
    assert {request.finish_reason for request in requests} == {"stop", "length"}
