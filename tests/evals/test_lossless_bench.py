"""`specdec eval lossless` over toy models: equal answers, and faults that were planted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import pytest
from torch import Tensor

from specdec.errors import UsageError
from specdec.evals.data.sample import Sample
from specdec.evals.lossless import bench
from specdec.evals.lossless.answer import Answer
from specdec.evals.lossless.bench import compare_all
from specdec.evals.lossless.comparison import Comparison, Divergence
from specdec.evals.lossless.in_process import InProcess
from specdec.evals.lossless.margin import Margin
from specdec.evals.lossless.question import Asked, Question
from specdec.evals.lossless.render import is_lossless, make_report, tallies_of
from specdec.evals.lossless.run import Run
from specdec.evals.report.journal import Journal
from specdec.generation import generate
from specdec.kernels.batch import Batch
from specdec.model_runner import ModelRunner
from specdec.params import SamplingParams
from specdec.sampling import Sampler
from specdec.target import TargetOutput
from specdec.tree import DraftTree
from tests.evals.lossless_toy import (
    DRAFTER,
    TIE_MARGIN,
    compared,
    config_for,
    samples,
    settings_for,
    write_twins,
)
from tests.evals.toy_folder import write_toy
from tests.wrong_rule import verify_by


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("lossless") / "model")


def report_text(comparisons: Sequence[Comparison], *, forgives: bool = False) -> str:
    made = make_report({}, comparisons, tie_margin=TIE_MARGIN, forgives_ties=forgives)
    made.json()
    return made.text()


def test_equal_answers_are_counted(folder: Path) -> None:
    found = compared(folder, settings=(DRAFTER, "ngram"), seeds=2)
    assert len(found) == 2 * 3 * (1 + 2)  # settings, samples, greedy and two seeds
    assert is_lossless(found, forgives_ties=False)
    tallies = tallies_of(found)
    assert [(one.setting, one.temperature) for one in tallies] == [
        *((DRAFTER, 0.0), (DRAFTER, 1.0)),
        *(("ngram", 0.0), ("ngram", 1.0)),
    ]
    assert [len(one.comparisons) for one in tallies] == [3, 6, 3, 6]
    assert all(one.num_compared == sum(len(c.answer.token_ids or ()) for c in one.comparisons)
               for one in tallies)  # fmt: skip
    assert all(tally.tokens_per_step and tally.tokens_per_step > 1.5 for tally in tallies[:2])
    seeds = {one.question.seed for one in tallies[1].comparisons}
    assert len(seeds) == 6
    text = report_text(found)
    assert "All 18 answers are equal: at most 18 % of answers" in text  # 3.84 / (18 + 3.84)


def second_at(position: int) -> Callable[..., tuple[int | None, int]]:
    """A rule that takes the second token at one output position, if there are drafts."""

    def rule(
        tree: DraftTree, node: int, logits: Tensor, sampler: Sampler, output_ids: Sequence[int]
    ) -> tuple[int | None, int]:
        token_id = sampler.choose(logits, output_ids)
        if len(output_ids) == position and tree.num_nodes > 1:
            logits = logits.clone()
            logits[token_id] = float("-inf")
            token_id = sampler.choose(logits, output_ids)
        return tree.child_with(node, token_id), token_id

    return rule


def test_a_verifier_that_takes_the_second_token_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_by(second_at(5), monkeypatch)
    respondent = InProcess(config_for(folder))
    found = compare_all(settings_for(settings=(DRAFTER,)), respondent, Journal(None, {}))
    diverged = [one for one in found if one.divergence is not None]
    assert len(diverged) >= 4 and {one.question.temperature for one in diverged} == {0.0, 1.0}
    for one in diverged:
        divergence = one.divergence
        assert divergence is not None and divergence.margin is not None
        assert one.plain.token_ids is not None and one.answer.token_ids is not None
        assert divergence.position == 5 and divergence.kind == "fault"
        assert divergence.plain == one.plain.token_ids[5]
        assert divergence.other == one.answer.token_ids[5] != divergence.plain
        assert one.num_compared == 6
        # The second token was taken, so its distance to the best is the margin of both.
        assert divergence.margin.gap == pytest.approx(divergence.margin.top2, abs=1e-5)
        assert divergence.origin.endswith(tuple("123456"))
        if not one.question.temperature:
            prompt = one.question.sample.encode(respondent._engines["plain"].tokenizer)
            params = SamplingParams(max_tokens=6, logprobs=2)
            token = generate(respondent._engines["plain"], prompt, params).tokens[5]
            (_, best), (second_id, second) = token.top_logprobs
            assert second_id == divergence.other
            assert divergence.margin.gap == pytest.approx(best - second, abs=1e-4)
    text = report_text(found)
    assert f"{len(diverged)} of 6 answers differ: {len(diverged)} by a fault, 0 at a near" in text
    assert "fault" in text and not is_lossless(found, forgives_ties=True)


def test_an_answer_that_ends_early_is_a_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = InProcess._answer

    def cut(self: InProcess, question: Question, request: object) -> Answer:
        whole = end(self, question, request)  # type: ignore[arg-type]  # called as the original is
        return (
            replace(whole, token_ids=(whole.token_ids or ())[:7]) if whole.num_accepted else whole
        )

    monkeypatch.setattr(InProcess, "_answer", cut)
    found = compared(folder, temperatures=(0.0,))
    assert all(one.divergence for one in found)
    for one in found:
        assert one.divergence is not None and one.divergence.margin is None
        assert (one.divergence.position, one.divergence.other) == (7, None)
        assert one.divergence.kind == "fault"
    assert "the end" in report_text(found)


TWIN = 200


def test_a_near_tie_is_told_from_a_fault(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that rounding moves by 1e-4 where a batch has more rows: the twin wins there."""
    usual = [one.plain.token_ids or () for one in compared(folder, temperatures=(0.0,))]
    token = Counter(chain.from_iterable(usual)).most_common(1)[0][0]
    twins = write_twins(tmp_path / "model", token, TWIN)
    assert is_lossless(compared(twins, temperatures=(0.0,)), forgives_ties=False)
    forward = ModelRunner.forward

    def by_rows(self: ModelRunner, batch: Batch) -> TargetOutput:
        output = forward(self, batch)
        if len(output.logits) == 1:
            return output
        logits = output.logits.clone()
        logits[:, TWIN] += 1e-4
        return replace(output, logits=logits)

    monkeypatch.setattr(ModelRunner, "forward", by_rows)
    found = compared(twins, temperatures=(0.0,))
    diverged = [one.divergence for one in found if one.divergence is not None]
    assert diverged and not is_lossless(found, forgives_ties=False)
    for divergence in diverged:
        assert (divergence.plain, divergence.other) == (token, TWIN)
        assert divergence.margin is not None and 0 < divergence.margin.gap < 1e-4
        assert divergence.kind == "near tie"
    assert is_lossless(found, forgives_ties=True)
    exacting = compared(twins, temperatures=(0.0,), tie_margin=1e-9)
    assert not is_lossless(exacting, forgives_ties=True)


def test_answers_that_change_with_their_neighbours_are_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any drafts: what is wrong is the batching."""
    forward = ModelRunner.forward

    def mixed(self: ModelRunner, batch: Batch) -> TargetOutput:
        output = forward(self, batch)
        if len(batch.first_logit) < 3:
            return output
        return replace(output, logits=output.logits.roll(1, dims=0))

    monkeypatch.setattr(ModelRunner, "forward", mixed)
    alone = compared(folder, settings=("none",), concurrency=1)
    assert is_lossless(alone, forgives_ties=False)
    assert "no draft was accepted" in report_text(alone)
    together = compared(folder, settings=("none",), concurrency=3)
    assert not is_lossless(together, forgives_ties=True)


def test_turns_build_on_the_plain_answers(folder: Path) -> None:
    first = compared(folder, samples=samples("more", "again"), max_tokens=8, num_turns=1)
    assert [one.question.turn for one in first] == [0] * 6
    found = compared(folder, samples=samples("more", "again"), max_tokens=8)
    assert [one.question.turn for one in found] == [0, 1, 2] * 6
    assert is_lossless(found, forgives_ties=False)
    for before, after in pairwise(found):
        if after.question.turn:
            assert after.question.answers == (*before.question.answers, before.plain.text)
    told = {one.question.key: one.plain.token_ids for one in found}
    assert all(told[one.question.key] == one.plain.token_ids for one in first)


def test_a_prompt_without_room_is_refused_before_anything_is_asked(folder: Path) -> None:
    long = replace(
        samples()[0], sample_id="long", messages=({"role": "user", "content": "a" * 600},)
    )
    with pytest.raises(UsageError, match="sample long does not fit the context"):
        compared(folder, samples=[*samples(), long])


def test_a_token_that_the_model_does_not_have_is_told_by_file_and_line(folder: Path) -> None:
    foreign = Sample("x", "chat", prompt_ids=(1, 999), place="data.jsonl:3")
    with pytest.raises(UsageError, match=r"data\.jsonl:3 has token 999"):
        compared(folder, samples=[*samples(), foreign])


def test_a_conversation_ends_where_the_context_does(folder: Path) -> None:
    asked = samples("a" * 300, "a" * 300)
    found = compared(folder, samples=asked, max_tokens=8)
    assert {one.question.turn for one in found} == {0, 1}
    config = config_for(folder)
    report = Run(
        samples=asked, drafters=(DRAFTER,), config=config, seeds=1, max_tokens=8
    ).equality()
    assert report.data["num_skipped"] == 6  # the third turn of three samples at two temperatures
    assert "6 later turns were not asked" in report.text()


def test_an_interrupted_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(settings=(DRAFTER, "ngram"))
    whole = compare_all(settings, InProcess(config_for(folder)), Journal(None, {}))
    add, left = Journal.add, [9]

    def stopping(self: Journal, key: str, record: object) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        add(self, key, record)

    file = tmp_path / "part.jsonl"
    monkeypatch.setattr(Journal, "add", stopping)
    with pytest.raises(KeyboardInterrupt), Journal(file, {}) as journal:
        compare_all(settings, InProcess(config_for(folder)), journal)
    monkeypatch.undo()
    asked: list[str] = []
    ask = InProcess.ask

    def noted(self: InProcess, setting: str, items: Sequence[Asked], *rest: object) -> None:
        asked.extend(f"{setting}, {item.question.key}" for item in items)
        ask(self, setting, items, *rest)  # type: ignore[arg-type]  # called as the original is

    monkeypatch.setattr(InProcess, "ask", noted)
    with Journal(file, {}) as journal:
        resumed = compare_all(settings, InProcess(config_for(folder)), journal)
    assert len(asked) == 6 + 12 - 9  # plain answers and two settings'
    assert [one.answer.token_ids for one in resumed] == [one.answer.token_ids for one in whole]


def test_predictions_are_answers_with_places_edited() -> None:
    items = "abcdefghijklmnopqrst"
    found = bench.edited(items, 1)
    assert len(found) == len(items) and set(found) <= set(items) and found != tuple(items)
    assert bench.edited((), 1) == ()


def test_synthetic_drafters_are_told_the_whole_answer(folder: Path) -> None:
    found = compared(folder, settings=("synthetic=1:1:1",), temperatures=(0.0,), max_tokens=20)
    tally = tallies_of(found)[0]
    assert tally.num_equal == 3 and tally.tokens_per_step == 4


def test_near_ties_can_be_forgiven() -> None:
    question = Question(0, samples()[0], 0, 0.0, 1, 9)
    plain, other = Answer("ab", (1, 2), "length"), Answer("ac", (1, 3), "length")
    tie = Divergence(1, 2, 3, "b", "c", "", Margin(0.0, 0.0), "near tie")
    equal = Comparison("x", question, plain, plain, None)
    close = Comparison("x", question, plain, other, tie)
    wrong = replace(close, divergence=replace(tie, kind="fault"))
    assert is_lossless([equal], forgives_ties=False)
    assert not is_lossless([equal, close], forgives_ties=False)
    assert is_lossless([equal, close], forgives_ties=True)
    assert not is_lossless([close, wrong], forgives_ties=True)
    assert "Near ties fail too" in report_text([equal, close])
    assert "forgiven" in report_text([equal, close], forgives=True)
