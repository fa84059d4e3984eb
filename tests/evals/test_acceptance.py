"""`specdec eval acceptance` in process: its questions, its turns, resuming, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from specdec.errors import ContextLengthExceeded, SpecdecError, UsageError
from specdec.evals.acceptance.answer import Reply
from specdec.evals.acceptance.asker import Question
from specdec.evals.acceptance.drawn import heading
from specdec.evals.acceptance.edited import NUM_EDITS, SHARE, with_edits
from specdec.evals.acceptance.in_process import InProcess
from specdec.evals.acceptance.report import has_unequal
from specdec.evals.acceptance.run import AcceptanceSettings, run
from specdec.evals.acceptance.setting import Setting, Sweep, in_turn, numbers
from specdec.evals.acceptance.tables import markdown
from specdec.evals.data.formats import read_samples
from specdec.evals.data.questions import code_edits
from specdec.evals.data.sample import Sample
from specdec.evals.eval_commands import eval_app
from tests.evals.acceptance_case import chats
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy

SWEEP = Sweep(("ngram", "prediction,suffix"), node_budgets=(2, 8), temperatures=(0.0, 1.0))
ASKED = [
    Sample("1", "chat", ({"role": "user", "content": "the cat"},), ("and the dog?", "which one?")),
    Sample("2", "qa", ({"role": "user", "content": "who"},)),
    Sample("3", "chat", ({"role": "user", "content": "aaaa"},)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("acceptance") / "model")


@pytest.fixture
def settings(folder: Path) -> AcceptanceSettings:
    config = replace(toy_config(folder, "native"), control="fixed")
    load_or_skip(config)
    return AcceptanceSettings(ASKED, SWEEP, config, max_tokens=40)


def named(report: Any) -> dict[str, Any]:
    return {entry["name"]: entry for entry in report.data["settings"]}


def untimed(report: Any) -> dict[str, Any]:
    """The counts of all answers of each setting."""
    keys = ("answers", "steps", "accepted_lengths", "sources", "unequal_answers")
    return {name: [entry["all"][key] for key in keys] for name, entry in named(report).items()}


def test_code_edits_hold_whole_functions() -> None:
    found = code_edits(6)
    texts = [sample.messages[0]["content"] for sample in found]
    assert len(found) == len(set(texts)) == len({sample.sample_id for sample in found}) == 6
    assert all(text.count("```") == 2 and "def " in text for text in texts)


@given(token_ids=st.lists(st.integers(0, 9), min_size=3, max_size=400), seed=st.integers(0, 1000))
def test_three_spans_differ(token_ids: list[int], seed: int) -> None:
    """Other tokens are of another alphabet, so what was put in can be told from what was there."""
    edited = with_edits(token_ids, seed, 10)
    length = max(1, round(SHARE * len(token_ids) / NUM_EDITS))
    assert len(edited) == len(token_ids)  # one span put in, one left out
    marked = with_edits(range(len(token_ids)), seed, 1)  # all wrong tokens are 0
    kept = [token for token in marked if token]
    assert kept == sorted(set(kept))  # in order
    num_missing = len(token_ids) - 1 - len(kept)
    # The spans left out and replaced; token 0 itself may be in one of them.
    assert 2 * length - 1 <= num_missing <= 2 * length


def test_a_sweep_is_a_product_with_plain_decoding_at_each_temperature() -> None:
    found = SWEEP.settings()
    assert len(found) == 2 * (1 + 2 * 2) == len({setting.name for setting in found})
    plain = [index for index, setting in enumerate(found) if setting.is_plain]
    assert plain == [0, 5] and [found[index].temperature for index in plain] == [0.0, 1.0]
    assert found[1].name == "ngram, 2 nodes, T 0"
    assert [item.name for item in Sweep(("none", "suffix")).settings()] == ["none", "suffix"]


def test_settings_begin_in_turn_and_those_that_need_the_answer_come_last() -> None:
    found = SWEEP.settings()
    free = [setting for setting in found if not setting.needs_answer]
    orders = [in_turn(found, number) for number in range(len(found))]
    assert {order[0].name for order in orders} == {setting.name for setting in free}
    for order in orders:
        assert sorted(map(str, order)) == sorted(map(str, found))
        assert {setting.name for setting in order[: len(free)]} == {item.name for item in free}


def test_a_toy_report(settings: AcceptanceSettings, tmp_path: Path) -> None:
    report = run(settings, tmp_path)
    found = named(report)
    assert list(found) == [setting.name for setting in SWEEP.settings()]
    for entry in found.values():
        assert list(entry["tasks"]) == ["chat", "qa"]
        assert entry["all"]["answers"] == 5 and entry["all"]["unequal_answers"] == 0
        assert entry["tasks"]["chat"]["answers"] == 4, "three turns and one"
    assert found["none, T 0"]["all"]["tokens_per_step"]["token_weighted"]["value"] == 1
    assert found["none, T 0"]["all"]["decode_speedup"]["value"] == 1
    predicted = found["prediction,suffix, 8 nodes, T 0"]["all"]
    # Nearly the answer itself was predicted.
    assert predicted["tokens_per_step"]["token_weighted"]["value"] > 2
    assert predicted["sources"]["prediction"]["accepted"] > 0
    for name, entry in found.items():
        widest = max((row["verified"] for row in entry["all"]["positions"]), default=0)
        assert widest > 0 or name.startswith("none")
        per_step = entry["all"]["drafted_per_step"]
        assert per_step <= (8 if "8 nodes" in name else 2)
    assert not has_unequal(report.data) and "every answer equals" in report.text()
    assert set(report.figures) == {
        *("positions", "tasks", "accepted-lengths", "node-budget", "temperature", "sources"),
    }
    assert {file.name for file in tmp_path.iterdir()} == {
        *("acceptance.json", "acceptance.html", "answers.jsonl"),
        *(f"acceptance-{name}.png" for name in report.figures),
        *(f"acceptance-{table.name}.csv" for table in (*report.tables, *report.details)),
    }
    assert markdown(report.data).count("\n") == 1 + len(found)


def test_a_later_turn_comes_after_the_plain_answers(
    settings: AcceptanceSettings, tmp_path: Path
) -> None:
    run(settings, tmp_path)
    tokenizer = load_or_skip(settings.config).tokenizer
    assert tokenizer is not None
    recorded = read_samples(tmp_path / "answers.jsonl")
    assert [(sample.sample_id, sample.task) for sample in recorded] == [
        *(("1", "chat"), ("1, turn 2", "chat"), ("1, turn 3", "chat")),
        *(("2", "qa"), ("3", "chat")),
    ]
    answers: list[str] = []
    for sample in recorded[:3]:
        assert list(sample.prompt_ids or ()) == ASKED[0].encode(tokenizer, answers)
        assert sample.output_ids is not None
        answers.append(tokenizer.decode(sample.output_ids))


def test_a_token_that_the_model_does_not_have_is_told_before_anything_is_asked(
    settings: AcceptanceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcess, "ask", lambda *_: pytest.fail("asked"))
    foreign = Sample("x", "chat", prompt_ids=(1, 999), place="data.jsonl:3")
    with pytest.raises(UsageError, match=r"data\.jsonl:3 has token 999"):
        run(replace(settings, samples=[*ASKED, foreign]))


def test_a_picture_says_that_it_leaves_settings_out() -> None:
    def sweep(count: int) -> dict[str, Any]:
        of_all = {"temperature": 0.0, "max_depth": None}
        return {
            "settings": [
                {"drafter": f"d{index}", "node_budget": nodes, **of_all}
                for index in range(count)
                for nodes in (4, 8)
            ]
        }

    assert heading("Speed", sweep(7)) == "Speed: temperature 0, 8 nodes"
    assert heading("Speed", sweep(9)) == "Speed: temperature 0, 8 nodes, the first 7 of 9"
    assert heading("Speed", sweep(7), but="node_budget") == "Speed: temperature 0"
    assert heading("Speed", sweep(8), but="node_budget") == "Speed: temperature 0, the first 7 of 8"


def test_turns_can_be_bounded(settings: AcceptanceSettings) -> None:
    report = run(replace(settings, num_turns=2))
    assert named(report)["ngram, 8 nodes, T 1"]["all"]["answers"] == 4


def test_a_depth_bounds_positions(settings: AcceptanceSettings) -> None:
    report = run(replace(settings, sweep=Sweep(("prediction",), (8,), depths=(1, 3))))
    found = named(report)
    for depth in (1, 3):
        rows = found[f"prediction, depth {depth}"]["all"]["positions"]
        assert [row["position"] for row in rows if row["verified"]] == list(range(1, depth + 1))
    assert "depth" in report.figures


def test_adaptive_control_gives_each_setting_an_engine_that_learns_alone(
    settings: AcceptanceSettings,
) -> None:
    config = replace(settings.config, control="adaptive")
    asked = InProcess(config, SWEEP.settings())
    engines = [asked._engine(setting) for setting in SWEEP.settings()]
    assert [engine.controller.control for engine in engines].count("adaptive") == 8
    assert len({id(engine) for engine in engines}) == 8 + 1
    assert len({id(engine.loaded) for engine in engines}) == 1
    report = run(replace(settings, config=config))
    assert not has_unequal(report.data)


def test_an_interrupted_run_goes_on(
    settings: AcceptanceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(settings)
    ask = InProcess.ask
    seen: list[str] = []

    def stopped(self: InProcess, question: Question, *rest: Any) -> Reply:
        if question.sample.sample_id == "3" and "3" not in seen:
            seen.append("3")
            raise KeyboardInterrupt
        seen.append(question.sample.sample_id)
        return ask(self, question, *rest)

    monkeypatch.setattr(InProcess, "ask", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path)
    assert not (tmp_path / "acceptance.json").exists()
    del seen[:-1]
    assert untimed(run(settings, tmp_path)) == untimed(whole)
    assert set(seen) == {"3"}, "the others were on disk"
    assert not (tmp_path / "acceptance.part.jsonl").exists()


def test_prompts_without_room_are_skipped_and_counted(settings: AcceptanceSettings) -> None:
    """Contexts of 512: the second turn of the first sample has none, the last sample neither."""
    long = "x" * 400
    samples = [
        Sample("1", "chat", ({"role": "user", "content": "hm"},), (long, "more")),
        *chats(["fits", 2 * long]),
    ]
    report = run(replace(settings, samples=samples, max_tokens=100))
    assert all(entry["all"]["answers"] == 2 for entry in report.data["settings"])
    assert report.data["num_skipped"] == 2 * 3, "two turns and one, at two temperatures"
    assert "6 turns were skipped" in report.text()
    with pytest.raises(SpecdecError, match="no prompt left room"):
        run(replace(settings, samples=chats([2 * long])))
    engines = InProcess(settings.config, SWEEP.settings())
    with pytest.raises(ContextLengthExceeded):
        engines.ask(Question(chats([2 * long])[0], (), 0, 1), SWEEP.settings()[0], None)


def unequal(self: InProcess, question: Question, setting: Setting, plain: Reply | None) -> Reply:
    found = _ask(self, question, setting, plain)
    if setting.drafter != "ngram" or question.sample.sample_id != "2":
        return found
    return replace(found, token_ids=(*(found.token_ids or ()), 1))


_ask = InProcess.ask


def test_an_unequal_answer_is_told(
    settings: AcceptanceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcess, "ask", unequal)
    report = run(settings)
    assert has_unequal(report.data)
    assert named(report)["ngram, 8 nodes, T 1"]["tasks"]["qa"]["unequal_answers"] == 1
    assert named(report)["ngram, 8 nodes, T 1"]["tasks"]["chat"]["unequal_answers"] == 0
    assert "4 answers DIFFER" in report.text()
    lossy = run(replace(settings, config=replace(settings.config, verification="typical")))
    assert not has_unequal(lossy.data) and "as this verification allows" in lossy.text()
    greedy = replace(settings, config=replace(settings.config, verification="rejection"))
    promised = [greedy.must_be_equal(setting) for setting in SWEEP.settings()]
    assert promised == [True] * 5 + [False] * 5


def test_more_tokens_per_step_that_cost_more_lose(
    settings: AcceptanceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: InProcess, question: Question, setting: Setting, plain: Reply | None) -> Reply:
        found = _ask(self, question, setting, plain)
        if setting.is_plain:
            return found
        return replace(found, measured=replace(found.measured, decode_s=1e3))

    monkeypatch.setattr(InProcess, "ask", slow)
    report = run(replace(settings, sweep=Sweep(("prediction",), (8,))))
    assert "(loses)" in markdown(report.data).splitlines()[-1]
    lines = [line for line in report.text().splitlines() if "yet" in line]
    assert len(lines) == 1 and lines[0].startswith("prediction: ") and "(loses)" in lines[0]


COMMAND = ("acceptance", "--threads", "1", "--kv-memory-mib", "8", "--weights", "fp32")


def invoke(*options: str) -> Any:
    return CliRunner().invoke(eval_app, [*COMMAND, *options])


def test_the_command_tells_by_its_exit_code(
    folder: Path, settings: AcceptanceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "who", "id": "2"}\n{"prompt": "me", "id": "4"}\n')
    options = ["--model", str(folder), "--data", str(data), "--max-tokens", "8"]
    found = invoke(*options, "--drafter", "ngram", "--json")
    assert found.exit_code == 0, found.output
    assert [entry["name"] for entry in json.loads(found.stdout)["settings"]] == ["none", "ngram"]
    monkeypatch.setattr(InProcess, "ask", unequal)
    found = invoke(*options, "--drafter", "ngram", "--markdown")
    assert found.exit_code == 1 and found.stdout.startswith("| `--drafter` |")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--drafter", "sufix"], "unknown drafter 'sufix'"),
        (["--node-budget", "4,0"], "--node-budget must be between 1 and 255, not 0"),
        (["--depth", "a"], "--depth takes numbers"),
        (["--temperature", "-1"], "--temperature must be between 0 and 100"),
        (["--temperature", "nan"], "--temperature must be between 0 and 100"),
        (["--task", "nothing"], "no task 'nothing'"),
        (["--data", "missing.jsonl"], "cannot read missing.jsonl"),
        (["--api-key", "k"], "--api-key is a server's: use it with --url"),
        (["--url", "http://localhost:1"], "--weights is for the start of a server"),
        (["--control", "sometimes"], "unknown control"),
        (["--out", "pyproject.toml"], "name a folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(
        "specdec.evals.acceptance.in_process.load_model", lambda _: pytest.fail("loaded")
    )
    found = invoke(*options)
    assert isinstance(found.exception, UsageError), found.output
    assert words in str(found.exception) and "\n" not in str(found.exception)


def test_two_files_may_not_share_ids(settings: AcceptanceSettings) -> None:
    with pytest.raises(UsageError, match="two samples have the id '1'"):
        replace(settings, samples=[*ASKED, ASKED[0]])


@given(values=st.lists(st.integers(1, 99), min_size=1))
def test_numbers_are_taken_once_and_in_order(values: Sequence[int]) -> None:
    text = ",".join(map(str, values))
    assert numbers("--depth", text, int) == tuple(dict.fromkeys(values))
