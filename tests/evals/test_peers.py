"""Contenders: ours and peers', what a peer misses, and answers of the same length."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import SpecdecError, UsageError
from specdec.evals.client.exchange import Arrival
from specdec.evals.latency import peers
from specdec.evals.latency.contender import Contender, Question, Run, checked, num_equal, ours
from specdec.evals.latency.peer_setup import PeerSetup
from specdec.evals.latency.peers import PeerName, best_of, make_peers, packages
from specdec.generation import generate
from specdec.params import SamplingParams
from tests.evals.toy_folder import write_toy
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
        ("openvino:lookup", "openvino_genai", r"pip install 'specdec-server\[peers\]'"),
        ("llama.cpp:lookup=4", "llama_cpp", r"pip install 'specdec-server\[peers\]'"),
        ("vllm", None, "unknown peer 'vllm'; .* or give a server's URL"),
        ("openvino:ngram", None, "own speculation is openvino:lookup, or openvino:lookup=N"),
        ("openvino@", None, "a model of its own is openvino@FOLDER or llama.cpp@FILE"),
        ("transformers@folder", None, "a model of its own is openvino@FOLDER or llama.cpp@FILE"),
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


def test_a_model_of_its_own_is_looked_for_where_it_is_named(tmp_path: Path) -> None:
    """The setup has none at all."""
    setup = PeerSetup("model", 100)
    modules = {name: ModuleType(name) for name in ("openvino_genai", "llama_cpp")}
    names = [f"openvino:lookup@{tmp_path}", f"llama.cpp@{tmp_path / 'a.gguf'}"]
    with patch.dict(sys.modules, modules):
        for name in names:
            with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
                peers.check_peers([name], setup)
        (tmp_path / "openvino_model.xml").touch()
        (tmp_path / "a.gguf").touch()
        assert peers.check_peers(names, setup) == {}
        with pytest.raises(UsageError, match="openvino needs --openvino-model"):
            peers.check_peers([*names, "openvino"], setup)


@pytest.mark.parametrize(
    ("names", "twice"),
    [
        (["transformers", "transformers"], "transformers"),
        (["transformers:lookup", "transformers:lookup=10"], "transformers:lookup=10"),
        (["vllm=http://a", "transformers", "vllm=http://b"], "vllm"),
        (["openvino@a/int8", "openvino@b/int8"], "openvino@int8"),
    ],
)
def test_contenders_of_one_name_are_refused(names: list[str], twice: str) -> None:
    """Before a server is asked or a package looked for."""
    with pytest.raises(UsageError, match=f"^--vs: {twice} is named twice$"):
        peers.check_peers(names, PeerSetup("model", 100))


def test_a_name_stands_for_settings() -> None:
    several = PeerName.parse("openvino:lookup")
    assert several.contenders == tuple(f"openvino:lookup={n}" for n in (3, 5, 8, 10, 15))
    assert PeerName.parse("openvino:lookup=7").contenders == ("openvino:lookup=7",)
    assert PeerName.parse("llama.cpp").contenders == ("llama.cpp",)
    names = ["openvino", "openvino:lookup", "transformers:lookup=4", "http://127.0.0.1:1"]
    assert best_of(names) == {"openvino:lookup": several.contenders}  # not of a single one
    assert packages(names) == ["openvino-genai", "transformers"]


def test_a_name_is_told_by_the_last_part_of_its_model() -> None:
    """And a server by its label."""
    lookup = PeerName.parse("openvino:lookup@/exported/model-int8")
    assert lookup.model == Path("/exported/model-int8")
    assert lookup.contenders == tuple(f"openvino:lookup={n}@model-int8" for n in (3, 5, 8, 10, 15))
    assert best_of([lookup.text]) == {"openvino:lookup@model-int8": lookup.contenders}
    assert PeerName.parse("llama.cpp@a/b.gguf").contenders == ("llama.cpp@b.gguf",)
    setup = PeerSetup("model", 100, Path("one"), Path("two"))
    assert lookup.setup(setup) == replace(setup, openvino_model=lookup.model)
    assert PeerName.parse("llama.cpp@b").setup(setup) == replace(setup, gguf=Path("b"))
    assert PeerName.parse("openvino").setup(setup) == setup
    assert PeerName.parse("vllm ngram=http://a:1/v1").contenders == ("vllm ngram",)
    assert PeerName.parse("http://a:1/?b=http://c").contenders == ("http://a:1/?b=http://c",)
