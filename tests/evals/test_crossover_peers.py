"""Many streams of peers: OpenVINO GenAI and servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from specdec.errors import SpecdecError, UsageError
from specdec.evals.client.exchange import Arrival, Exchange
from specdec.evals.crossover.openvino_loop import OpenVinoLoop, OpenVinoPipeline
from specdec.evals.crossover.server_loop import ServerLoop, replayed
from specdec.evals.crossover.side import check_peers, peer_loops
from specdec.evals.crossover.workloads import Task
from specdec.evals.latency.contender import Question
from specdec.evals.latency.openvino_peer import LOOKUPS
from specdec.evals.latency.peer_setup import PeerSetup
from tests.evals.test_server_peer import Start, host  # noqa: F401  # a fixture


def tasks(*lengths: int, temperature: float = 0.0) -> list[Task]:
    return [
        Task(Question(tuple((1, 2, 3 + seed) * 3), length, temperature, seed))
        for seed, length in enumerate(lengths)
    ]


# --- servers ---


def test_a_server_has_so_many_clients_all_the_time(host: Start) -> None:  # noqa: F811  # a fixture
    served = host()
    loop = ServerLoop(served.url)
    served.server.bodies.clear()
    run = loop.run(tasks(6, 3, 5), 3, 7)
    assert run.answers == tuple(tuple(range(length)) for length in (6, 3, 5, 6, 3, 5, 6))
    assert run.num_tokens > 0 and run.seconds > 0 and not run.steps
    bodies = [body for _, body in served.server.bodies]
    # The other clients were still being answered when the last counted request ended.
    assert len(bodies) >= 7 + 2
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in bodies)
    assert len({body["cache_salt"] for body in bodies}) == len(bodies)
    asked = {(tuple(body["prompt"]), body["max_tokens"], body["seed"]) for body in bodies}
    wanted = (task.question for task in tasks(6, 3, 5))
    assert asked == {(one.prompt_ids, one.num_tokens, one.seed) for one in wanted}


def test_a_server_that_fails_or_answers_in_another_length_is_told(host: Start) -> None:  # noqa: F811  # a fixture
    served = host()
    loop = ServerLoop(served.url)
    served.server.is_broken = True
    with pytest.raises(SpecdecError, match="did not answer: 500 out of order"):
        loop.run(tasks(6), 2, 4)
    served.server.is_broken = False
    short = Exchange(1.0, 1.0, "ok", num_output=5)

    async def put(*_: object) -> Exchange:
        return short

    with (
        patch.object(loop, "_put", put),
        pytest.raises(SpecdecError, match="with 5 tokens instead of 6: it cannot be compared"),
    ):
        loop.run(tasks(6), 2, 4)


def test_arrivals_that_nobody_counts_stand_for_as_many_each() -> None:
    """Seven tokens in three chunks of a server that does not say how many came with which."""
    arrivals = tuple(Arrival(at, None) for at in (1.0, 2.0, 3.0))
    first = Exchange(0.0, 0.5, "ok", arrivals=(Arrival(0.5, None),), num_output=7)
    second = Exchange(1.0, 3.0, "ok", arrivals=arrivals, num_output=7)
    run = replayed({0: first, 1: second}, 1, 2)
    assert (run.num_tokens, run.seconds) == (7, 3.5)


def test_a_server_says_who_it_is(host: Start) -> None:  # noqa: F811  # a fixture
    """This one answers every GET like /v1/models, so that it has no version."""
    served = host()
    loop = ServerLoop(served.url)
    assert (loop.owner, loop.version) == ("", "")

    async def told(_: object, path: str) -> Any:
        found = {"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}}
        return found.get(path, {"version": "0.32.0"})

    with patch("specdec.evals.client.endpoint.Endpoint.get_json", told):
        loop = ServerLoop(served.url)
    assert (loop.owner, loop.version) == ("vllm", "0.32.0")


# --- OpenVINO GenAI ---


def fake_openvino() -> dict[str, ModuleType]:
    """Its continuous batching as far as it is used: one token a step, with lookup up to three."""
    openvino, genai = ModuleType("openvino"), ModuleType("openvino_genai")
    genai.made = []  # type: ignore[attr-defined]  # a module in the making

    class Handle:
        def __init__(self, prompt: Any, config: Any) -> None:
            self.prompt, self.config = prompt, dict(vars(config))
            self.total, self.num_done, self.unread = config.max_new_tokens, 0, list[Any]()
            self.is_stopped = False

        def can_read(self) -> bool:
            return bool(self.unread)

        def read(self) -> dict[int, Any]:
            return {0: SimpleNamespace(generated_ids=self.unread.pop(0))}

        def get_status(self) -> str:
            return "running" if self.num_done < self.total else "finished"

        def stop(self) -> None:
            self.is_stopped = True

    class Pipeline:
        def __init__(self, folder: str, scheduler: Any, device: str, properties: Any) -> None:
            genai.made.append(self)
            self.folder, self.scheduler, self.device = folder, scheduler, device
            self.properties, self.handles = properties, dict[int, Handle]()
            self.num_running = list[int]()

        def add_request(self, request_id: int, prompt: Any, config: Any) -> Handle:
            assert request_id not in self.handles
            self.handles[request_id] = Handle(prompt, config)
            return self.handles[request_id]

        def _left(self) -> list[Handle]:
            all_handles = self.handles.values()
            return [h for h in all_handles if h.num_done < h.total and not h.is_stopped]

        def step(self) -> None:
            self.num_running.append(len(self._left()))
            for handle in self._left():
                most = 3 if "num_assistant_tokens" in handle.config else 1
                count = min(most, handle.total - handle.num_done)
                # A token at a time, as its own queue has them.
                handle.unread += [[handle.num_done + n] for n in range(count)]
                handle.num_done += count

        def has_non_finished_requests(self) -> bool:
            return bool(self._left())

    openvino.Tensor = lambda array: array.tolist()  # type: ignore[attr-defined]  # a module in the making
    for name, value in {
        "ContinuousBatchingPipeline": Pipeline,
        "GenerationStatus": SimpleNamespace(RUNNING="running"),
        "SchedulerConfig": SimpleNamespace,
        "GenerationConfig": SimpleNamespace,
    }.items():
        setattr(genai, name, value)
    return {"openvino": openvino, "openvino_genai": genai}


@pytest.fixture
def genai() -> Iterator[Any]:
    modules = fake_openvino()
    with patch.dict(sys.modules, modules):
        yield modules["openvino_genai"]


def test_openvino_batches_so_many_streams_all_the_time(genai: Any, tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").touch()
    setup = PeerSetup("model", 0, tmp_path)
    names = ["openvino", "openvino:lookup"]
    loops = peer_loops(names, setup, check_peers(names, setup))
    assert list(loops) == ["openvino", *(f"openvino:lookup={n}" for n in LOOKUPS)]
    plain, lookup = genai.made  # one for the lookups together
    run = loops["openvino"].run(tasks(6, 3, 5), 3, 7)
    assert run.answers == tuple(tuple(range(length)) for length in (6, 3, 5, 6, 3, 5, 6))
    assert set(plain.num_running) == {3} and not plain.has_non_finished_requests()
    # Three answers have ended after the sixth step, seven after the twelfth; a step brings three.
    assert run.num_tokens == 3 * (12 - 6)
    assert plain.device == "CPU"
    assert plain.properties.keys() == {"INFERENCE_NUM_THREADS", "ENABLE_CPU_PINNING"}
    assert not plain.scheduler.enable_prefix_caching
    asked = plain.handles[1]
    assert asked.prompt == [[1, 2, 4] * 3]
    assert asked.config == {"ignore_eos": True, "max_new_tokens": 3, "do_sample": False}
    loops["openvino:lookup=5"].run(tasks(6, 3, 5), 2, 4)
    assert lookup.properties["prompt_lookup"] is True
    assert lookup.handles[0].config["num_assistant_tokens"] == 5
    loops["openvino"].run(tasks(6, 3, temperature=0.5), 2, 4)
    sampled = list(plain.handles.values())[-2].config
    assert sampled["do_sample"] and (sampled["temperature"], sampled["top_p"]) == (0.5, 1.0)


@pytest.mark.parametrize("extra", [-1, 1])
def test_openvino_must_answer_with_as_many_tokens(extra: int, genai: Any) -> None:
    loop = OpenVinoLoop(OpenVinoPipeline(Path("any"), with_lookup=False), None)
    (pipeline,) = genai.made
    add = pipeline.add_request

    def other(request_id: int, prompt: Any, config: Any) -> Any:
        config.max_new_tokens += extra
        return add(request_id, prompt, config)

    step = pipeline.step

    def two_at_once() -> None:
        step()
        step()

    with (
        patch.object(pipeline, "add_request", other),
        patch.object(pipeline, "step", two_at_once),
        pytest.raises(SpecdecError, match=rf"with {5 + extra} tokens instead of 5"),
    ):
        loop.run(tasks(5), 1, 2)


# --- what can be told before anything is loaded ---


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["transformers"], "transformers is not measured with many streams; give openvino"),
        (["openvino", "openvino"], "openvino is named twice"),
        (["openvino:lookup", "openvino:lookup=5"], "openvino:lookup=5 is named twice"),
        (["openvino"], "--vs openvino needs --openvino-model"),
        (["mlx"], "unknown peer 'mlx'"),
        (["http://127.0.0.1:9"], "no server answers at"),
    ],
)
def test_peers_are_refused_before_they_are_loaded(names: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_peers(names, PeerSetup("model", 0))


def test_a_model_of_its_own_is_a_side_of_its_own(genai: Any, tmp_path: Path) -> None:
    """As its 8-bit export beside that of 16 bits; and a server goes by its label."""
    for name in ("fp16", "int8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "openvino_model.xml").touch()
    setup = PeerSetup("model", 0, tmp_path / "fp16")
    names = ["openvino", f"openvino@{tmp_path / 'int8'}"]
    loops = peer_loops(names, setup, check_peers(names, setup))
    assert list(loops) == ["openvino", "openvino@int8"]
    assert [Path(pipeline.folder).name for pipeline in genai.made] == ["fp16", "int8"]
    with pytest.raises(UsageError, match="none has not"):
        check_peers([f"openvino@{tmp_path / 'none'}"], setup)


def test_a_server_goes_by_its_label(host: Start) -> None:  # noqa: F811  # a fixture
    name = f"vllm ngram={host().url}"
    setup = PeerSetup("model", 0)
    loops = peer_loops([name], setup, check_peers([name], setup))
    assert list(loops) == ["vllm ngram"]
    run = loops["vllm ngram"].run(tasks(6), 1, 2)
    assert run.answers == (tuple(range(6)),) * 2
