"""Shadow: what is chosen, when it runs, and what becomes of it, with an engine that is a list."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import scipy.stats

from specdec.config import EngineConfig
from specdec.errors import EngineStopped, UsageError
from specdec.params import SamplingParams
from specdec.request import FinishReason, TokenRecord
from specdec.server import shadow as shadow_module
from specdec.server.messages import Output, Submit
from specdec.server.output_stream import OutputStream
from specdec.server.service import Service
from specdec.server.settings import ServerSettings
from specdec.server.shadow import MAX_TRIES, NUM_LOOKS, Shadow, check_shadow
from specdec.server.shadow_queue import ShadowQueue
from specdec.server.supervisor import Supervisor

PARAMS = SamplingParams(temperature=0.5, logprobs=3)


def records(*ids: int) -> list[TokenRecord]:
    return [TokenRecord(token_id, ("target",), 1, 0) for token_id in ids]


@dataclass
class Engine:
    """Takes requests; what it brings for them is the test's to say."""

    streams: dict[str, OutputStream] = field(default_factory=dict)
    submitted: list[Submit] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def submit(self, requests: Sequence[Submit]) -> OutputStream:
        (request,) = requests
        stream = OutputStream([request.request_id], observe=lambda _: None, abort=self.abort)
        self.streams[request.request_id] = stream
        self.submitted.append(request)
        return stream

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def bring(self, *ids: int, reason: FinishReason | None = None, **more: Any) -> None:
        """For the request that came last."""
        request_id = self.submitted[-1].request_id
        self.streams[request_id].put(Output(request_id, records(*ids), reason, **more))


class Bench:
    """A Shadow of everything, its engine, and what it says."""

    def __init__(self, share: float = 1.0, **more: Any) -> None:
        self.engine, self.said = Engine(), list[str]()
        self.is_idle = True
        self.shadow = Shadow(
            self.engine, share, is_idle=lambda: self.is_idle, say=self.said.append, **more
        )

    def answer(
        self, request_id: str, *ids: int, reason: FinishReason = "stop", **more: Any
    ) -> None:
        """A request goes to the engine and is answered."""
        self.shadow.begin([Submit(request_id, (1, 2), PARAMS, **more)], f"shown-{request_id}")
        self.shadow.take(Output(request_id, seed=77))
        for token_id in ids:
            self.shadow.take(Output(request_id, records(token_id)))
        self.shadow.take(Output(request_id, [], reason))

    async def until(self, check: Callable[[], object]) -> None:
        for _ in range(1000):
            if check():
                return
            await asyncio.sleep(0)
        raise AssertionError("it did not happen")

    async def runs(self, number: int) -> Submit:
        """The n-th repetition, once it runs."""
        await self.until(lambda: len(self.engine.submitted) >= number)
        await asyncio.sleep(0)
        return self.engine.submitted[number - 1]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_module, "LOOK_S", 0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_the_share_is_chosen_at_random(share: float) -> None:
    """And neither the first ones nor every n-th: runs of chosen ones are as long as chance's."""

    async def test() -> None:
        queue = ShadowQueue(10**6, 10**9)
        bench = Bench(share, draw=random.Random(5).random, queue=queue)
        bench.is_idle = False
        chosen = []
        for number in range(4000):
            before = bench.shadow.num_waiting
            bench.answer(str(number), 3)
            chosen.append(bench.shadow.num_waiting > before)
        low, high = scipy.stats.binom.interval(0.999, len(chosen), share)
        assert low <= sum(chosen) <= high
        both = sum(a and b for a, b in itertools.pairwise(chosen))
        low, high = scipy.stats.binom.interval(0.999, len(chosen) - 1, share**2)
        assert low <= both <= high

    run(test)


def test_each_choice_is_chosen_by_itself() -> None:
    async def test() -> None:
        draws = iter([0.9, 0.1, 0.9])
        bench = Bench(0.5, draw=lambda: next(draws))
        bench.is_idle = False
        bench.shadow.begin([Submit(f"r-{i}", (1,), PARAMS) for i in range(3)], "shown")
        for i in (2, 0, 1):
            bench.shadow.take(Output(f"r-{i}", records(4), "length", seed=i))
        assert bench.shadow.num_waiting == 1
        bench.is_idle = True
        again = await bench.runs(1)
        assert again.params.seed == 1
        bench.engine.bring(5)
        await bench.until(lambda: bench.said)
        assert "shown choice 1 differs" in bench.said[0]

    run(test)


def test_an_equal_answer_is_checked_and_nothing_is_said() -> None:
    async def test() -> None:
        bench = Bench()
        bench.answer("r", 3, 4, 5, cache_salt="s", prediction_ids=(9,), priority=2)
        again = await bench.runs(1)
        params = SamplingParams(temperature=0.5, seed=77)
        assert again == Submit(again.request_id, (1, 2), params, cache_salt="s", is_shadow=True)
        bench.engine.bring(3)
        bench.engine.bring(4, 5, reason="stop")
        await bench.until(lambda: bench.shadow.num_checked)
        assert (bench.shadow.num_divergences, bench.shadow.num_tokens) == (0, 3)
        assert bench.said == bench.engine.aborted == []

    run(test)


def test_the_first_difference_ends_the_run() -> None:
    async def test() -> None:
        bench = Bench()
        bench.answer("r", 3, 4, 5)
        again = await bench.runs(1)
        bench.engine.bring(3, 6)
        await bench.until(lambda: bench.shadow.num_checked)
        assert bench.shadow.num_divergences == len(bench.said) == 1
        assert bench.engine.aborted == [again.request_id]
        dropped = {"full": 0, "interrupted": 0, "failed": 0}
        told = {"checked": 1, "divergences": 1, "dropped": dropped, "waiting": 0}
        assert bench.shadow.as_json() == told

    run(test)


@pytest.mark.parametrize("how", ["abort", "error", "aborted", "refused"])
def test_what_did_not_end_by_itself_is_not_repeated(how: str) -> None:
    async def test() -> None:
        bench = Bench()
        shadow = bench.shadow
        shadow.begin([Submit("r", (1,), PARAMS)], "shown")
        if how == "refused":
            shadow.take(Output("r", finish_reason="error", error="too long"))
        else:
            shadow.take(Output("r", records(3), seed=1))
        if how == "aborted":
            shadow.take(Output("r", finish_reason="abort"))
        elif how == "error":  # as at a deadline
            shadow.take(Output("r", finish_reason="error", error="late"))
        shadow.abort("r")
        shadow.take(Output("r", records(4), "stop"))  # which was under way
        assert (shadow.num_waiting, sum(shadow.dropped.values())) == (0, 0)

    run(test)


def test_a_client_that_leaves_is_told_of() -> None:
    """Nothing is kept of its request, of which no output comes any more."""

    async def test() -> None:
        service = Service(Supervisor(), "toy", ServerSettings(shadow=1.0))
        assert service.shadow is not None
        service.shadow.begin([Submit("r", (1,), PARAMS), Submit("s", (1,), PARAMS)], "shown")
        service.take(Output("r", records(3)))
        service.abort("r")
        assert list(service.shadow._following) == ["s"]

    run(test)


def test_it_waits_until_all_looks_in_a_row_find_the_engine_idle() -> None:
    async def test() -> None:
        bench = Bench()
        looks = iter([True, True, True, False, True, True, "come"])
        num_looks = 0

        def is_idle() -> bool:
            nonlocal num_looks
            num_looks += 1
            look = next(looks, True)
            if look == "come":
                asyncio.get_running_loop().call_soon(bench.shadow.interrupt)
            return bool(look)

        bench.shadow._is_idle = is_idle
        bench.answer("r", 3)
        await bench.runs(1)
        assert num_looks == 7 + NUM_LOOKS + 1, "after a request it counts from the start"

    run(test)


def test_a_request_ends_it_at_once_and_it_runs_again_later() -> None:
    async def test() -> None:
        bench = Bench()
        bench.answer("r", 3, 4)
        first = await bench.runs(1)
        bench.engine.bring(3)
        bench.is_idle = False
        bench.shadow.interrupt()
        assert bench.engine.aborted == [first.request_id], "before anything else is done"
        bench.shadow.interrupt()
        await bench.until(lambda: bench.shadow.num_waiting)
        assert bench.shadow.num_checked == 0
        bench.is_idle = True
        second = await bench.runs(2)
        assert second.request_id != first.request_id
        bench.engine.bring(3, 4, reason="stop")
        await bench.until(lambda: bench.shadow.num_checked)
        assert bench.engine.aborted == [first.request_id]
        assert not sum(bench.shadow.dropped.values())

    run(test)


def test_a_run_that_was_through_when_a_request_came_counts() -> None:
    async def test() -> None:
        bench = Bench()
        bench.answer("r", 3)
        await bench.runs(1)
        bench.engine.bring(3, reason="stop")
        bench.shadow.interrupt()
        await bench.until(lambda: bench.shadow.num_checked)
        assert bench.shadow.num_waiting == 0

    run(test)


def test_what_is_interrupted_too_often_is_dropped() -> None:
    async def test() -> None:
        bench = Bench()
        bench.answer("r", 3)
        bench.answer("s", 4)
        for number in range(1, 2 * MAX_TRIES + 1):
            await bench.runs(number)
            bench.shadow.interrupt()
        await bench.until(lambda: bench.shadow.dropped["interrupted"] == 2)
        assert bench.shadow.num_waiting == 0
        assert len(bench.engine.submitted) == 2 * MAX_TRIES
        assert bench.engine.aborted == [submit.request_id for submit in bench.engine.submitted]

    run(test)


def test_one_that_fails_is_dropped_and_the_next_one_runs() -> None:
    async def test() -> None:
        bench = Bench()
        bench.answer("r", 3)
        bench.answer("s", 4)
        await bench.runs(1)
        bench.engine.bring(reason="error", error="no memory")
        await bench.runs(2)
        assert bench.shadow.dropped == {"full": 0, "failed": 1}
        bench.engine.bring(4, reason="stop")
        await bench.until(lambda: bench.shadow.num_checked)

    run(test)


def test_an_engine_that_ends_meanwhile_is_not_ended_by_all_that_wait() -> None:
    async def test() -> None:
        bench = Bench()
        for name in "rst":
            bench.answer(name, 3)
        again = await bench.runs(1)
        bench.engine.streams[again.request_id].fail("it was killed", EngineStopped.__name__)
        await bench.until(lambda: bench.shadow.dropped["failed"] == 3)
        bench.answer("u", 4)
        await bench.runs(2)
        bench.engine.bring(4, reason="stop")
        await bench.until(lambda: bench.shadow.num_checked)

    run(test)


def test_a_full_queue_drops_the_oldest_and_counts_them() -> None:
    async def test() -> None:
        bench = Bench(queue=ShadowQueue(max_requests=2))
        bench.is_idle = False
        for token_id in range(5):
            bench.answer(str(token_id), token_id)
        assert (bench.shadow.num_waiting, bench.shadow.dropped["full"]) == (2, 3)
        bench.is_idle = True
        for number, token_id in ((1, 3), (2, 4)):
            await bench.runs(number)
            bench.engine.bring(token_id, reason="stop")
        await bench.until(lambda: bench.shadow.num_checked == 2)
        assert bench.shadow.num_divergences == 0

    run(test)


def test_equal_tokens_must_be_promised() -> None:
    for verification in ("rejection", "typical"):
        config = EngineConfig(verification=verification)
        check_shadow(0.0, config)
        with pytest.raises(UsageError, match=f"--verification {verification} does not promise"):
            check_shadow(0.01, config)
    check_shadow(1.0, EngineConfig())


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(UsageError, match="shadow"):
        ServerSettings(shadow=share)
