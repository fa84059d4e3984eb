"""Prompts that a target writes, and the corpus of its answers: whole, resumable, of one plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec import checkpoints
from specdec.config import EngineConfig
from specdec.drafters.training import collection, commands
from specdec.drafters.training.collection import CollectionPlan, collect, write_questions
from specdec.drafters.training.corpus import read_shard
from specdec.drafters.training.prompts import (
    Prompt,
    openings,
    read_prompts,
    standard_functions,
    write_prompts,
)
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.loading import LoadedModel
from specdec.params import SamplingParams
from specdec.request import Request
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy

PROMPTS = [
    Prompt(task, ({"role": "user", "content": text},))
    for task, text in [("chat", "hello"), ("qa", "who?"), ("math", "1+1"), ("chat", "bye")]
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return toy_config(write_toy(tmp_path_factory.mktemp("collection") / "model"), "native")


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedModel:
    return load_or_skip(config)


def plan(prompts: list[Prompt] = PROMPTS, seed: int = 0) -> CollectionPlan:
    return CollectionPlan(prompts, max_tokens=12, prompts_per_shard=2, seed=seed)


def test_a_corpus_holds_answers_and_the_states_that_chose_them(
    config: EngineConfig, loaded: LoadedModel, tmp_path: Path
) -> None:
    progress: list[tuple[int, int]] = []
    collect(config, plan(), tmp_path, loaded=loaded, on_progress=lambda *x: progress.append(x))
    shape = loaded.model.config
    files = sorted(tmp_path.glob("shard-*.safetensors"))
    found = [s for f in files for s in read_shard(f, shape.hidden_size, shape.vocab_size)]
    assert len(files) == 2 and len(found) == 8
    assert [(s.task, s.temperature) for s in found[:4]] == [
        ("chat", 0.0),
        ("chat", 1.0),
        ("qa", 0.0),
        ("qa", 1.0),
    ]
    assert progress[-1] == (8, sum(len(s.output) for s in found))
    head = checkpoints.open_weights(Path(config.model)).get("model.embed_tokens.weight").float()
    for sequence in found:
        assert len(sequence.hidden) == len(sequence.output) > 0
        if sequence.temperature == 0.0:  # bf16 states of a model whose choices are no near ties
            chosen = (sequence.hidden.float() @ head.t()).argmax(1)
            assert (chosen == sequence.output).float().mean() > 0.9
    facts = json.loads((tmp_path / "corpus.json").read_text())
    assert facts["hidden_size"] == shape.hidden_size and facts["model"] == config.model


def test_answers_are_those_of_generation(
    config: EngineConfig, loaded: LoadedModel, tmp_path: Path
) -> None:
    collect(config, plan(), tmp_path, loaded=loaded)
    shape = loaded.model.config
    (first, sampled, *_) = read_shard(
        tmp_path / "shard-00000.safetensors", shape.hidden_size, shape.vocab_size
    )
    engine = Engine(config, loaded=loaded)
    ids = tuple(engine.tokenizer.encode_chat(PROMPTS[0].messages))
    for sequence, temperature in ((first, 0.0), (sampled, 1.0)):
        request = Request("r", ids, SamplingParams(max_tokens=12, temperature=temperature, seed=0))
        engine.add(request)
        while engine.has_work:
            engine.step()
        assert sequence.output.tolist() == request.output_ids


def test_what_is_there_is_not_made_again(
    config: EngineConfig,
    loaded: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    collect(config, plan(), whole, loaded=loaded)
    run = collection._run

    def interrupted(engine: Engine, requests: list[Request]) -> object:
        if requests[0].request_id.startswith("2"):  # the second shard
            raise KeyboardInterrupt
        return run(engine, requests)

    monkeypatch.setattr(collection, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect(config, plan(), parts, loaded=loaded)
    first = parts / "shard-00000.safetensors"
    assert [f.name for f in sorted(parts.glob("shard*"))] == [first.name]
    written = first.stat().st_mtime_ns
    monkeypatch.setattr(collection, "_run", run)
    collect(config, plan(), parts, loaded=loaded)
    assert first.stat().st_mtime_ns == written
    for file in whole.iterdir():
        assert (parts / file.name).read_bytes() == file.read_bytes()


def test_a_folder_of_another_plan_is_refused(
    config: EngineConfig, loaded: LoadedModel, tmp_path: Path
) -> None:
    collect(config, plan(PROMPTS[:1]), tmp_path, loaded=loaded)
    with pytest.raises(UsageError, match="other prompts or settings"):
        collect(config, plan(PROMPTS[:2]), tmp_path, loaded=loaded)
    with pytest.raises(UsageError, match="other prompts or settings"):
        collect(config, plan(PROMPTS[:1], seed=1), tmp_path, loaded=loaded)


def test_prompts_too_long_for_the_context_are_left_out(
    config: EngineConfig, loaded: LoadedModel, tmp_path: Path
) -> None:
    long = Prompt("chat", ({"role": "user", "content": "x" * 600},))
    collect(config, plan([long, long, PROMPTS[0]]), tmp_path, loaded=loaded)
    assert [f.name for f in tmp_path.glob("shard*")] == ["shard-00001.safetensors"]


def test_openings_are_the_same_for_a_seed_and_cover_the_tasks() -> None:
    made = openings(60, 3)
    assert made == openings(60, 3) != openings(60, 4)
    tasks = {opening.task for opening in made}
    assert tasks == {"chat", "qa", "summary", "translation", "math", "code edit", "code", "rag"}
    assert all(o.is_whole for o in made if o.task in ("translation", "code edit"))


def test_functions_are_whole() -> None:
    functions = list(standard_functions(["textwrap"]))
    assert functions and all(function.startswith("def ") for function in functions)
    for function in functions:
        compile(function, "function", "exec")


def test_the_target_finishes_questions(config: EngineConfig, loaded: LoadedModel) -> None:
    engine = Engine(config, loaded=loaded)
    begun = [o for o in openings(40, 0) if len(o.text) < 200][:8]
    written = write_questions(engine, begun, seed=0)
    whole = [o.text.strip() for o in begun if o.is_whole]
    texts = [prompt.messages[0]["content"] for prompt in written]
    assert [text for text in texts if text in whole] == whole
    assert all(prompt.messages[0]["role"] == "user" for prompt in written)


def test_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    write_prompts(file, PROMPTS)
    assert read_prompts(file) == PROMPTS
    for text, match in [("", "holds no prompts"), ("{}", "prompts.jsonl:1 is not a prompt")]:
        file.write_text(text)
        with pytest.raises(UsageError, match=match):
            read_prompts(file)
    file.write_text(json.dumps({"task": "qa", "messages": []}) + "\n[1]\n")
    with pytest.raises(UsageError, match=r"prompts.jsonl:2 is not"):
        read_prompts(file)
    with pytest.raises(UsageError, match="cannot read"):
        read_prompts(tmp_path / "none")


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (file := tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt exists"):
        commands.prompts(file)
    with pytest.raises(UsageError, match="cannot write into"):
        commands.prompts(tmp_path / "none" / "prompts.jsonl")
    write_prompts(asked := tmp_path / "prompts.jsonl", PROMPTS)
    with pytest.raises(UsageError, match=r"notes\.txt is not a folder"):
        commands.data([asked], file)
    assert file.read_text() == "mine"
