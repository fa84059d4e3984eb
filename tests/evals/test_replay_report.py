"""`specdec eval replay`: what it reads and refuses, and its report against that of a live run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from specdec.config import EngineConfig
from specdec.drafters.suffix_pool import SuffixPool
from specdec.drafting import DraftContext, Drafter
from specdec.errors import SpecdecError, UsageError
from specdec.evals.acceptance import plots
from specdec.evals.acceptance import run as acceptance
from specdec.evals.acceptance.setting import Setting, Sweep
from specdec.evals.data.formats import read_samples
from specdec.evals.data.sample import Sample
from specdec.evals.replay import bench, target
from specdec.evals.replay.engine import ReplayEngine
from specdec.evals.replay.recording import Recording, recordings
from specdec.evals.replay.run import ReplaySettings, run
from specdec.evals.replay.target import load_drafter, read_model
from specdec.loading import LoadedModel
from specdec.plan import DecodeStep
from specdec.step_cost import StepCost
from specdec.tree import DraftTree
from tests.evals.toy_folder import toy_config, write_toy

TEXTS = ("abcabcabcab", "the cat sat on the cat", "0101010101")
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def config(folder: Path) -> EngineConfig:
    return replace(toy_config(folder, "torch"), control="fixed")


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedModel:
    return read_model(config)


def samples(output: str | None = "abcabcabcabc") -> list[Sample]:
    return [
        Sample(f"s{at}", f"task {at % 2}", text=text, output=output)
        for at, text in enumerate(TEXTS)
    ]


def test_a_replay_counts_what_the_live_run_counted(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Sweep(("ngram", "suffix", "prediction", "synthetic=0.9:0.6:0.3"), (4, 16))
    chats = [
        Sample(f"c{at}", f"task {at % 2}", ({"role": "user", "content": text},), ("more", "again"))
        for at, text in enumerate(TEXTS)
    ]
    asked = acceptance.AcceptanceSettings(
        [*samples(None), *chats], sweep, config, max_tokens=MAX_TOKENS
    )
    with monkeypatch.context() as patch:
        patch.setattr(plots, "drawable", lambda _: {})  # another test's business
        live = acceptance.run(asked, tmp_path)
    recorded = read_samples(tmp_path / "answers.jsonl")
    found = run(ReplaySettings(config, recorded, sweep, MAX_TOKENS), tmp_path)
    expected = {entry["name"]: entry for entry in live.data["settings"]}
    assert len(found.data["settings"]) == len(expected) - 1 == 8  # none is not replayed
    for entry in found.data["settings"]:
        want = expected[entry["name"]]
        for own, other in (
            (entry["all"], want["all"]),
            *((entry["tasks"][task], want["tasks"][task]) for task in ("task 0", "task 1")),
        ):
            for key in (
                *("answers", "output_tokens", "tokens_per_step", "accepted_lengths", "steps"),
                *("drafted_per_step", "accepted_per_step", "zero_draft_steps", "finish_reasons"),
            ):
                assert own[key] == other[key], (entry["name"], key)
            for row, like in zip(own["positions"], other["positions"], strict=True):
                assert row["verified"] == like["verified"] and row["accepted"] == like["accepted"]
    parts = {(one["of"], one["figure"]): one["parts"] for one in live.data["compared"]}
    for one in found.data["compared"]:
        assert one["parts"] == parts[one["of"], one["figure"]], "turns of a sample belong together"
    names = {file.name for file in tmp_path.iterdir()}
    assert {"replay.json", "replay.html", "replay-positions.png", "replay-steps.csv"} <= names
    assert {"replay-node-budget.png", "replay-accepted-lengths.png", "replay-sources.csv"} <= names
    assert not list(tmp_path.glob("*.part*"))


def test_an_interrupted_replay_goes_on(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ReplaySettings(config, samples(), Sweep(("ngram", "suffix"), (4, 8)))
    whole = run(settings, None)
    begun: list[str] = []

    def failing(loaded: LoadedModel, own: EngineConfig) -> Any:
        begun.append(own.drafter)
        if len(begun) == 4:
            raise KeyboardInterrupt
        return load_drafter(loaded, own)

    monkeypatch.setattr(bench, "load_drafter", failing)
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path)
    rest = run(settings, tmp_path)
    assert begun == ["ngram", "ngram", "suffix", "suffix", "suffix"]
    for own, other in zip(rest.data["settings"], whole.data["settings"], strict=True):
        assert own["name"] == other["name"]
        assert own["all"]["accepted_lengths"] == other["all"]["accepted_lengths"]
    begun.clear()
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path)
    with pytest.raises(UsageError, match="other settings"):
        run(replace(settings, samples=samples("another")), tmp_path)


def test_predicted_speed_is_the_price_of_the_steps(config: EngineConfig, tmp_path: Path) -> None:
    """A row costs as much as a step: guesses gain what is accepted and lose the rest."""
    cost = StepCost.of(lambda n, context, rows: 100.0 * rows, max_rows=64, max_requests=4)
    file = tmp_path / "cost.json"
    identity = {"model": "toy", "weights": "fp32", "device": "abacus"}
    file.write_text(json.dumps({"identity": identity, "table": cost.as_json()}))
    recorded = samples("abcabcabcabcabcabc")
    found = run(ReplaySettings(config, recorded, Sweep(("suffix",), (4,)), None, str(file)), None)
    plain, suffix = found.data["settings"]
    assert plain["name"] == "none" and plain["all"]["decode_speedup"]["value"] == 1
    assert found.data["step_cost"] == f"{file}, toy with fp32 weights, abacus"
    own = replace(config, drafter="suffix", node_budget=4)
    loaded = read_model(own)
    plain_s = own_s = 0.0
    for recording in recordings(recorded, loaded):
        engine = ReplayEngine(own, loaded, load_drafter(loaded, own))
        request = recording.request(Setting("x", "suffix", node_budget=4), engine.vocab_size)
        first, *steps = engine.replay(request, recording.output_ids)
        num_timed = len(recording.output_ids) - first.num_tokens
        seconds = sum(100.0 * (1 + sum(step.verified)) for step in steps)
        plain_s += 100.0 * (len(recording.output_ids) - 1)
        own_s += seconds / num_timed * (len(recording.output_ids) - 1)
    # Drafting takes real time, millionths of such steps.
    assert suffix["all"]["decode_speedup"]["value"] == pytest.approx(plain_s / own_s, rel=1e-4)
    assert any("predicted" in line for line in found.lines)


def test_costs_that_are_none_are_told(config: EngineConfig, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for content, words in (("{", "is not JSON"), ("[]", "no step costs"), ("{}", "no step costs")):
        bad.write_text(content)
        with pytest.raises(UsageError, match=words):
            run(ReplaySettings(config, samples(), Sweep(("ngram",)), None, str(bad)), None)
    with pytest.raises(UsageError, match="cannot read"):
        run(ReplaySettings(config, samples(), Sweep(("ngram",)), None, str(tmp_path / "x")), None)


def test_the_last_measured_costs_of_the_model_are_found(
    config: EngineConfig, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    settings = ReplaySettings(config, samples(), Sweep(("ngram",)), None, "measured")
    with pytest.raises(UsageError, match=r"no step costs of .* were measured here"):
        run(settings, None)
    (tmp_path / "step-cost").mkdir()
    table = StepCost.of(lambda *_: 1.0, max_rows=8, max_requests=2).as_json()
    own = {"model": config.model, "shape": repr(loaded.model.config), "weights": "w", "device": "d"}
    for name, identity in (("mine", own), ("other", {**own, "model": "another"}), ("hurt", None)):
        text = json.dumps({"identity": identity, "table": table})
        (tmp_path / "step-cost" / f"{name}.json").write_text(text)
    assert "mine.json" in run(settings, None).data["step_cost"]


def test_answers_end_as_they_were_recorded(loaded: LoadedModel) -> None:
    (eos,) = loaded.eos_token_ids

    def recorded(*output_ids: int, max_tokens: int | None = None) -> Recording:
        sample = Sample("a", "t", prompt_ids=(1, 2), output_ids=output_ids)
        return recordings([sample], loaded, max_tokens)[0]

    by_length = recorded(5, 6, 7).params
    assert by_length.max_tokens == 3 and by_length.ignore_eos
    by_itself = recorded(5, 6, eos).params
    assert by_itself.max_tokens == loaded.max_model_len and not by_itself.ignore_eos
    through = recorded(5, eos, 7, eos).params
    assert through.max_tokens == 4 and through.ignore_eos
    assert recorded(5, 6, eos, max_tokens=9).params.max_tokens == 9
    assert recorded(5, 6, 7, max_tokens=2).params.max_tokens == 2
    engine = ReplayEngine(EngineConfig(), loaded, Echo(0))
    for one in (recorded(5, 6, 7), recorded(5, 6, eos), recorded(5, eos, 7, eos)):
        request = one.request(Setting("none", "none"), engine.vocab_size)
        engine.replay(request, one.output_ids)
        assert request.output_ids == list(one.output_ids)


class Echo(Drafter):
    """Somebody else's: it knows tokens and the size of the vocabulary, and fails if told to."""

    name: ClassVar[str] = "echo"

    def __init__(self, vocab_size: int, fails: bool = False) -> None:
        self.vocab_size, self.fails = vocab_size, fails

    @classmethod
    def load(cls, context: DraftContext) -> Self:
        assert context.target.tokenizer is not None
        return cls(context.target.model.config.vocab_size, context.checkpoint == "fails")

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        if self.fails:
            raise ValueError("no")
        return [
            DraftTree.from_paths(
                step.root, [[step.root]], source=self.name, node_budget=step.node_budget
            )
            for step in steps
        ]


class Peeking(Echo):
    """It asks for what a replay has not."""

    name = "peeking"

    @classmethod
    def load(cls, context: DraftContext) -> Self:
        context.target.model.kv_bytes_per_block("auto", 32)
        return super().load(context)


class Hidden(Echo):
    name = "hidden"
    needs_hidden = True


class HiddenOnce(Echo):
    """It finds out when it is loaded."""

    name = "hidden-once"

    @classmethod
    def load(cls, context: DraftContext) -> Self:
        made = super().load(context)
        made.needs_hidden = True
        return made


@pytest.fixture
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {kind.name: kind for kind in (Echo, Peeking, Hidden, HiddenOnce)}

    def parsed(names: str) -> tuple[tuple[type[Drafter], str | None], ...]:
        parts = [name.partition("=") for name in names.split(",")]
        return tuple((known[name], checkpoint or None) for name, _, checkpoint in parts)

    monkeypatch.setattr(target, "parse_drafters", parsed)


@pytest.mark.usefixtures("_others")
def test_a_drafter_of_somebody_else_is_replayed(config: EngineConfig) -> None:
    report = run(ReplaySettings(config, samples("aabbc"), Sweep(("echo",), (2,))), None)
    # After each prompt: a, a right, then b (a wrong), b right, then c (b wrong).
    (entry,) = report.data["settings"]
    assert entry["all"]["accepted_lengths"][1] >= 3
    with pytest.raises(SpecdecError, match="s0: the drafter echo failed"):
        run(ReplaySettings(config, samples(), Sweep(("echo=fails",))), None)


@pytest.mark.usefixtures("_others")
@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("peeking", r"the target itself \(its kv_bytes_per_block\)"),
        ("hidden", "the target's hidden states"),
        ("hidden-once", "the target's hidden states"),
    ],
)
def test_who_needs_more_than_tokens_is_refused(
    config: EngineConfig, loaded: LoadedModel, name: str, need: str
) -> None:
    with pytest.raises(UsageError, match=f"the drafter {name} needs {need}.*eval acceptance"):
        load_drafter(loaded, replace(config, drafter=f"echo,{name}"))


@pytest.mark.parametrize("name", ["medusa", "small-model"])
def test_drafters_with_weights_are_refused(
    config: EngineConfig, loaded: LoadedModel, folder: Path, name: str
) -> None:
    with pytest.raises(UsageError, match=f"the drafter {name} needs the target.*has only tokens"):
        load_drafter(loaded, replace(config, drafter=f"suffix,{name}={folder}"))


def test_a_pool_lasts_for_one_setting_and_its_file_stays(
    config: EngineConfig, loaded: LoadedModel, tmp_path: Path
) -> None:
    file = tmp_path / "pool.safetensors"
    pool = SuffixPool(vocab_size=loaded.model.config.vocab_size)
    pool.add("", [ord(letter) for letter in "xyzw" * 3])
    pool.enter(100)
    pool.save(file)
    before = file.read_bytes()
    twice = [Sample(name, "t", text=f"{name}:", output="the quick brown fox") for name in "ab"]
    report = run(
        ReplaySettings(config, twice, Sweep((f"suffix={file}", "suffix"), (8,))), tmp_path / "out"
    )
    pooled, plain = report.data["settings"]
    assert pooled["all"]["steps"] < plain["all"]["steps"]
    assert file.read_bytes() == before
    both = run(ReplaySettings(config, twice, Sweep((f"suffix={file}",), (8, 9))), None)
    assert both.data["settings"][0]["all"]["steps"] == pooled["all"]["steps"]
    one = run(ReplaySettings(config, twice, Sweep((f"suffix={file}",), (9,))), None)
    key = "accepted_lengths"
    assert both.data["settings"][1]["all"][key] == one.data["settings"][0]["all"][key]
