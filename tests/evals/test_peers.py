"""Contenders: ours and peers', what a peer misses, and answers of the same length."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine import Engine
from specdec.errors import SpecdecError, UsageError
from specdec.evals.client.exchange import Arrival
from specdec.evals.latency import peers
from specdec.evals.latency.contender import Contender, Question, Run, checked, num_equal, ours
from specdec.evals.latency.peer_setup import PeerSetup
from specdec.evals.latency.peers import PeerName, best_of, make_peers, packages
from specdec.evals.latency.server_peer import ServerPeer
from specdec.generation import generate
from specdec.params import SamplingParams
from tests.evals.toy_folder import toy_config, write_toy
from tests.toy import toy_engine

PROMPT = (1, 2, 3) * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("peers") / "model")


# --- runs ---


@st.composite
def runs(draw: st.DrawFn) -> Run:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=20))
    gaps = draw(st.lists(st.integers(1, 1000), min_size=len(sizes), max_size=len(sizes)))
    times = [sum(gaps[: n + 1]) / 64 for n in range(len(gaps))]
    token_ids = tuple(range(sum(sizes)))
    return Run(token_ids, times[-1] + 1.0, tuple(map(Arrival, times, sizes)))


@given(runs())
def test_a_steps_time_is_shared_by_its_tokens(run: Run) -> None:
    """One value per token after the first step, and no time is lost."""
    counts = [arrival.num_tokens or 0 for arrival in run.arrivals]
    tokens = run.token_times_s()
    assert len(tokens) == run.num_tokens - counts[0] == run.decode[0]
    assert sum(tokens) == pytest.approx(sum(run.step_times_s())) == run.decode[1]
    assert run.tokens_per_step == run.num_tokens / len(counts)
    assert run.ttft_s == run.arrivals[0].at_s
    assert Run.from_json(json.loads(json.dumps(run.as_json()))) == run


def test_what_nobody_counts_is_not_known() -> None:
    """A server that does not say how many tokens came when."""
    run = Run(None, 1.0, (Arrival(0.5, None), Arrival(1.0, None)), num_told=8)
    assert run.tokens_per_step is None and run.token_times_s() == []
    assert run.step_times_s() == [0.5] and run.tokens_per_second == 8.0
    assert run.decode == (7, 0.5)
    assert Run.from_json(run.as_json()) == run


# --- ours ---


def test_our_contender_answers_with_as_many_tokens_as_it_is_told() -> None:
    """Past an end token too; with drafts the same ones."""
    engines = [toy_engine(drafter_name=name, prefix_cache=False) for name in ("none", "ngram")]
    plain, drafted = (ours(engine)(Question(PROMPT, 60)) for engine in engines)
    assert plain.token_ids == drafted.token_ids and plain.num_tokens == 60
    assert plain.tokens_per_step == 1.0 and plain.tokens_per_second == 60 / plain.total_s
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    steps = generate(
        toy_engine(drafter_name="ngram", prefix_cache=False), PROMPT, params, keeps_steps=True
    ).steps
    counts = [arrival.num_tokens or 0 for arrival in drafted.arrivals]
    assert counts == [step.num_tokens for step in steps] and max(counts) > 1
    for run in (plain, drafted):
        times = [arrival.at_s for arrival in run.arrivals]
        assert times[0] > 0 and times == sorted(set(times)) and times[-1] <= run.total_s


def test_our_contender_samples_by_its_seed() -> None:
    contender = ours(toy_engine(prefix_cache=False))
    asked = Question(PROMPT, 30, temperature=2.0, seed=1)
    first, again = contender(asked), contender(asked)
    other = contender(replace(asked, seed=2))
    assert first.token_ids == again.token_ids != other.token_ids


def test_a_peer_with_another_number_of_tokens_is_no_comparison() -> None:
    peer = checked("lazy", lambda question: Run((1, 2), 1.0))
    assert peer(Question((5,), 2)).token_ids == (1, 2)
    with pytest.raises(SpecdecError, match="lazy answered with 2 tokens instead of 3"):
        peer(Question((5,), 3))


def test_equal_tokens_end_at_the_first_difference() -> None:
    assert num_equal((1, 2, 3), (1, 9, 3)) == 1
    assert num_equal((1, 2), (1, 2)) == num_equal((1, 2), (1, 2, 3)) == 2
    assert num_equal((), (1,)) == 0


# --- names and what is missing ---


def make(name: str, setup: PeerSetup) -> dict[str, Contender]:
    """As `measure` does."""
    servers = peers.check_peers([name], setup)
    [(_, contenders)] = make_peers([name], setup, servers)
    return contenders


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("nobody", None, "unknown peer 'nobody'; choose from transformers, openvino, llama.cpp"),
        ("openvino", None, "needs --openvino-model FOLDER; write one once: optimum-cli export"),
        ("llama.cpp", None, "needs --gguf FILE"),
        ("transformers", "transformers", r"pip install 'specdec-server\[evals\]'"),
        ("openvino:lookup", "openvino_genai", "pip install openvino-genai"),
        ("llama.cpp:lookup=4", "llama_cpp", "pip install llama-cpp-python"),
        ("vllm:ngram", "vllm", "pip install vllm"),
        ("vllm:lookup", None, "own speculation is vllm:ngram, or vllm:ngram=N"),
        ("transformers:lookup=0", None, "or transformers:lookup=N for N tokens at a time"),
        ("transformers:lookup=x", None, "or transformers:lookup=N for N tokens at a time"),
        ("ftp://host", None, "unknown peer 'ftp'"),
        ("http://", None, "is no address of a server"),
    ],
)
def test_what_a_peer_misses_is_one_line_before_anything_is_loaded(
    tmp_path: Path, name: str, module: str | None, words: str
) -> None:
    setup = PeerSetup("model", 100)
    if module is not None:  # everything else is there
        (tmp_path / "openvino_model.xml").touch()
        setup = PeerSetup("model", 100, tmp_path, tmp_path / "openvino_model.xml")
        with patch.dict(sys.modules, {module: ModuleType(module)}):
            peers.check_peers([name], setup)
    with (
        patch.dict(sys.modules, {} if module is None else {module: None}),
        pytest.raises(UsageError, match=words) as caught,
    ):
        peers.check_peers([name], setup)
    assert "\n" not in str(caught.value)


def test_a_folder_or_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    setup = PeerSetup("model", 100, tmp_path, tmp_path / "no.gguf")
    with pytest.raises(UsageError, match=f"which {re.escape(str(tmp_path))} has not"):
        peers.check_peers(["openvino"], setup)
    with pytest.raises(UsageError, match=r"there is no .*no\.gguf"):
        peers.check_peers(["llama.cpp"], setup)


def test_a_lookup_that_cannot_sample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").touch()
    setup = PeerSetup("model", 100, tmp_path, temperature=0.8)
    with patch.dict(sys.modules, {"openvino_genai": ModuleType("openvino_genai")}):
        peers.check_peers(["openvino"], setup)
        with pytest.raises(UsageError, match="--temperature 0 only"):
            peers.check_peers(["openvino:lookup"], setup)


def test_a_name_stands_for_settings() -> None:
    several = PeerName.parse("openvino:lookup")
    assert several.contenders == ("openvino:lookup=3", "openvino:lookup=5", "openvino:lookup=10")
    assert PeerName.parse("openvino:lookup=7").contenders == ("openvino:lookup=7",)
    assert PeerName.parse("llama.cpp").contenders == ("llama.cpp",)
    names = ["openvino", "openvino:lookup", "vllm:ngram", "http://127.0.0.1:1"]
    assert best_of(names) == {"openvino:lookup": several.contenders}  # not of a single one
    assert packages(names) == ["openvino-genai", "vllm"]


# --- libraries ---


def test_transformers_answers_like_our_fp32(folder: Path) -> None:
    """The same prompt and the same number of tokens, though to its checkpoint all end an answer."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    ends = {"eos_token_id": list(range(256))}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    config = toy_config(folder, "torch")
    asked = Question(tuple(range(40, 60)), 12)
    own = ours(Engine(replace(config, drafter="none")))(asked)
    setup = PeerSetup(str(folder), 100)
    plain = make("transformers", setup)["transformers"]
    before = torch.get_num_threads()
    answer = plain(asked)
    assert torch.get_num_threads() == before
    assert answer.num_tokens == 12
    assert num_equal(answer.token_ids or (), own.token_ids or ()) > 0  # bf16 may part from fp32
    assert [arrival.num_tokens for arrival in answer.arrivals] == [1] * 12
    assert answer.arrivals[-1].at_s <= answer.total_s


def test_transformers_lookup_brings_several_tokens_at_once(folder: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    setup = PeerSetup(str(folder), 200)
    plain = make("transformers", setup)["transformers"]
    lookups = make("transformers:lookup", setup)
    assert list(lookups) == ["transformers:lookup=3", "transformers:lookup=10"]
    answer = plain(Question((5, 6, 7), 24)).token_ids or ()
    # Its own answer twice over is what it will find in the prompt.
    asked = Question((5, 6, 7, *answer, 5, 6, 7), 24)
    for found in (contender(asked) for contender in lookups.values()):
        counts = [arrival.num_tokens or 0 for arrival in found.arrivals]
        assert sum(counts) == found.num_tokens == 24
    sampled = lookups["transformers:lookup=3"](replace(asked, temperature=1.0, seed=3))
    assert sampled.num_tokens == 24


class FakeVllm(ModuleType):
    """vLLM's interface as documented, answering 100, 101, ... in steps of 1, 2, 1, 2, ... tokens;
    with speculation in steps of 3. Two steps without news come first."""

    def __init__(self) -> None:
        super().__init__("vllm")
        self.made: list[dict[str, Any]] = []
        self.asked: list[tuple[str, Any, Any]] = []
        self.SamplingParams = lambda **fields: SimpleNamespace(**fields)
        self.LLM = self.make

    def make(self, **options: Any) -> SimpleNamespace:
        self.made.append(options)
        engine = FakeVllmEngine(self.asked, 3 if "speculative_config" in options else None)
        return SimpleNamespace(llm_engine=engine)


@dataclass
class FakeVllmEngine:
    asked: list[tuple[str, Any, Any]]
    size: int | None
    done: list[int] = field(default_factory=list)
    num_steps: int = 0
    known_ids: set[str] = field(default_factory=set)

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        assert request_id not in self.known_ids
        self.known_ids.add(request_id)
        self.asked.append((request_id, prompt, params))
        self.done, self.num_steps = [], 0

    def has_unfinished_requests(self) -> bool:
        return len(self.done) < int(self.asked[-1][2].max_tokens)

    def step(self) -> list[SimpleNamespace]:
        self.num_steps += 1
        if self.num_steps == 1:
            return []
        if self.num_steps == 2:
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=())])]
        size = min(
            self.size or 2 - self.num_steps % 2, self.asked[-1][2].max_tokens - len(self.done)
        )
        self.done += range(100 + len(self.done), 100 + len(self.done) + size)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(self.done))])]


def test_vllm_is_asked_by_its_documented_interface(folder: Path) -> None:
    fake = FakeVllm()
    setup = PeerSetup(str(folder), 321)
    with patch.dict(sys.modules, {"vllm": fake}):
        plain, drafted = (make(name, setup) for name in ("vllm", "vllm:ngram"))
        asked = Question((7, 8), 7, temperature=0.5, seed=4)
        answer = plain["vllm"](asked)
        again = drafted["vllm:ngram=5"](replace(asked, num_tokens=7))
    assert answer.token_ids == again.token_ids == tuple(range(100, 107))
    assert [arrival.num_tokens for arrival in answer.arrivals] == [1, 2, 1, 2, 1]
    assert [arrival.num_tokens for arrival in again.arrivals] == [3, 3, 1]
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    common = {"model": str(folder), "dtype": "bfloat16", "max_model_len": 321}
    common["enable_prefix_caching"] = False
    assert fake.made == [common, {**common, "speculative_config": config}]
    _, prompt, params = fake.asked[0]
    assert prompt == {"prompt_token_ids": [7, 8]}
    assert vars(params) == {
        "temperature": 0.5,
        "seed": 4,
        "max_tokens": 7,
        "ignore_eos": True,
        "detokenize": False,
    }


def fake_openvino() -> dict[str, ModuleType]:
    """OpenVINO GenAI's interface as far as it is used: single tokens, then vectors of them."""
    openvino, genai = ModuleType("openvino"), ModuleType("openvino_genai")
    genai.made, genai.asked = [], []  # type: ignore[attr-defined]

    class Pipeline:
        def __init__(self, folder: str, device: str, **options: Any) -> None:
            genai.made.append((folder, device, options))

        def generate(self, prompt: Any, config: Any, streamer: Any) -> SimpleNamespace:
            genai.asked.append((prompt, dict(vars(config))))
            total, tokens = config.max_new_tokens, list[int]()
            while len(tokens) < total:
                news = list(range(len(tokens), min(total, len(tokens) + 1 + len(tokens) % 3)))
                tokens += news
                streamer.write(news[0] if len(news) == 1 else news)
            streamer.end()
            return SimpleNamespace(tokens=[tokens])

    openvino.Tensor = lambda array: array.tolist()  # type: ignore[attr-defined]
    for name, value in {
        "LLMPipeline": Pipeline,
        "StreamerBase": object,
        "StreamingStatus": SimpleNamespace(RUNNING=0),
        "SchedulerConfig": SimpleNamespace,
        "GenerationConfig": SimpleNamespace,
    }.items():
        setattr(genai, name, value)
    return {"openvino": openvino, "openvino_genai": genai}


def test_openvino_is_asked_as_it_wants_to_be(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").touch()
    setup = PeerSetup("model", 100, tmp_path)
    modules = fake_openvino()
    genai: Any = modules["openvino_genai"]
    with patch.dict(sys.modules, modules):
        [(_, plain), (_, lookups)] = make_peers(["openvino", "openvino:lookup"], setup, {})
        found = plain["openvino"](Question((7, 8), 6))
        sampled = plain["openvino"](Question((7, 8), 1, temperature=0.5, seed=4))
        for contender in lookups.values():
            contender(Question((7, 8), 6))
    assert found.token_ids == tuple(range(6)) and sampled.num_tokens == 1
    assert [arrival.num_tokens for arrival in found.arrivals] == [1, 2, 1, 2]
    assert len(genai.made) == 2  # one for the lookups together
    assert "prompt_lookup" not in genai.made[0][2] and genai.made[1][2]["prompt_lookup"] is True
    assert not genai.made[0][2]["scheduler_config"].enable_prefix_caching
    greedy, warm, *others = genai.asked
    assert greedy[0] == [[7, 8]]
    assert greedy[1] == {"ignore_eos": True, "max_new_tokens": 6, "do_sample": False}
    assert warm[1]["do_sample"] and (warm[1]["temperature"], warm[1]["rng_seed"]) == (0.5, 4)
    assert [config["num_assistant_tokens"] for _, config in others] == [3, 5, 10]


def fake_llama() -> dict[str, ModuleType]:
    """llama-cpp-python's interface as far as it is used: each forward brings two tokens where it
    drafts, one where it does not."""
    llama_cpp, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    llama_cpp.made = []  # type: ignore[attr-defined]

    class Llama:
        def __init__(self, file: str, **options: Any) -> None:
            llama_cpp.made.append(self)
            self.options, self.calls = options, list[Any]()
            self.draft_model = options["draft_model"]

        def reset(self) -> None:
            self.calls.append("reset")

        def set_seed(self, seed: int) -> None:
            self.calls.append(seed)

        def eval(self, tokens: Any) -> None:
            """A forward."""

        def generate(self, tokens: list[int], **sampling: Any) -> Iterator[int]:
            guessed = self.draft_model and self.draft_model.num_pred_tokens
            self.calls.append((tokens, sampling, guessed))
            token = 0
            while True:
                self.eval(tokens)
                for _ in range(2 if self.draft_model else 1):
                    yield token
                    token += 1

    llama_cpp.Llama = Llama  # type: ignore[attr-defined]
    speculative.LlamaPromptLookupDecoding = SimpleNamespace  # type: ignore[attr-defined]
    return {"llama_cpp": llama_cpp, "llama_cpp.llama_speculative": speculative}


def test_llama_tells_which_forward_a_token_came_from(tmp_path: Path) -> None:
    (file := tmp_path / "model.gguf").touch()
    modules = fake_llama()
    with patch.dict(sys.modules, modules):
        names = ["llama.cpp", "llama.cpp:lookup"]
        [(_, plain), (_, lookups)] = make_peers(names, PeerSetup("m", 99, gguf=file), {})
        alone = plain["llama.cpp"](Question((7, 8), 3, temperature=0.5, seed=4))
        pairs = [contender(Question((7, 8), 5)) for contender in lookups.values()]
    assert [arrival.num_tokens for arrival in alone.arrivals] == [1, 1, 1]
    for pair in pairs:
        assert pair.token_ids == (0, 1, 2, 3, 4)
        assert [arrival.num_tokens for arrival in pair.arrivals] == [2, 2, 1]
    model, drafting = modules["llama_cpp"].made
    assert (model.options["n_ctx"], model.options["logits_all"]) == (99, False)
    assert drafting.options["logits_all"] is True
    reset, seed, (tokens, sampling, _) = model.calls
    assert (reset, seed, tokens, sampling["temp"]) == ("reset", 4, [7, 8], 0.5)
    assert (sampling["top_k"], sampling["top_p"], sampling["min_p"]) == (0, 1.0, 0.0)
    assert [call[2] for call in drafting.calls if isinstance(call, tuple)] == [2, 10]


# --- servers ---


class Served(BaseHTTPRequestHandler):
    """A server that streams `max_tokens` tokens, two to a chunk, and refuses what `server` says."""

    server: Any

    def log_message(self, *_: Any) -> None:
        """Quietly."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "served"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refused = self.server.refused & (body.keys() | {self.path})
        if refused:
            self._send(400, f"what is {min(refused)}?")
            return
        self.server.bodies.append((self.path, body))
        if self.server.is_broken:
            self._send(500, "out of order")
            return
        chunks, total = [], body["max_tokens"]
        for done in range(0, total, 2):
            ids = list(range(done, min(total, done + 2)))
            choice: dict[str, Any] = {"text": "ab", "index": 0}
            if body.get("return_token_ids"):
                choice["token_ids"] = ids
            usage = {"prompt_tokens": 3, "completion_tokens": done + len(ids)}
            usage["prompt_tokens_details"] = {"cached_tokens": 2}  # type: ignore[assignment]
            chunks.append(json.dumps({"choices": [choice], "usage": usage}))
        self._send(200, "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@dataclass
class Host:
    """A running one."""

    server: Any
    url: str


Start = Callable[..., Host]


@pytest.fixture
def host() -> Iterator[Start]:
    running: list[ThreadingHTTPServer] = []

    def start(*refused: str) -> Host:
        server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Served)
        server.refused, server.bodies, server.is_broken = set(refused), [], False
        running.append(server)
        Thread(target=server.serve_forever, args=(0.01,)).start()
        return Host(server, f"http://127.0.0.1:{server.server_port}")

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_a_server_is_asked_by_token_ids_and_says_when_tokens_come(host: Start) -> None:
    served = host()
    peer = ServerPeer(served.url)
    found = peer(Question((4, 5, 6), 5, temperature=0.5, seed=9))
    assert found.token_ids == (0, 1, 2, 3, 4) and found.num_prefix_hit == 2
    assert [arrival.num_tokens for arrival in found.arrivals] == [2, 2, 1]
    peer(Question((4, 5, 6), 5))
    (path, body), (_, again) = served.server.bodies[-2:]
    assert path == "/v1/completions" and body["prompt"] == [4, 5, 6]
    asked = {name: body[name] for name in ("model", "temperature", "seed", "max_tokens")}
    assert asked == {"model": "served", "temperature": 0.5, "seed": 9, "max_tokens": 5}
    assert body["ignore_eos"] and body["cache_salt"] != again["cache_salt"]


def test_fields_that_a_server_refuses_are_left_out(host: Start) -> None:
    served = host("cache_salt", "return_token_ids")
    found = ServerPeer(served.url)(Question((4, 5, 6), 5))
    assert found.token_ids is None and found.num_tokens == 5
    body = served.server.bodies[-1][1]
    assert body["ignore_eos"] and not body.keys() & {"cache_salt", "return_token_ids"}


def test_a_server_may_be_asked_by_messages(host: Start) -> None:
    served = host("/v1/completions")
    with pytest.raises(UsageError, match=r"400 what is /v1/completions\?; or ask by .*#chat"):
        ServerPeer(served.url)
    messages = ({"role": "user", "content": "Why?"},)
    peer = ServerPeer(f"{served.url}/v1#chat")
    assert peer.is_chat and peer(Question((4,), 3, messages=messages)).num_tokens == 3
    path, body = served.server.bodies[-1]
    assert path == "/v1/chat/completions" and body["messages"] == list(messages)
    assert "prompt" not in body


def test_a_server_that_fails_later_is_no_answer(host: Start) -> None:
    served = host()
    peer = ServerPeer(served.url)
    served.server.is_broken = True
    with pytest.raises(SpecdecError, match="did not answer: 500 out of order"):
        peer(Question((4,), 3))
    with pytest.raises(UsageError, match="no server answers at"):
        peers.check_peers(["http://127.0.0.1:1"], PeerSetup("m", 9))
