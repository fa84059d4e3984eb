"""Sample: how it is asked, which ones are taken, and what a model cannot be given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UsageError
from specdec.evals.data.formats import read_samples
from specdec.evals.data.sample import Sample, digest, first_of_each_task
from tests.toy import ALPHABET, toy_tokenizer


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def some(*tasks: str) -> list[Sample]:
    return [Sample(str(index), task, user("a")) for index, task in enumerate(tasks)]


def test_the_first_of_each_task_in_order() -> None:
    samples = some("a", "b", "a", "b", "b", "c")

    def ids(*args: Any) -> list[str]:
        return [sample.sample_id for sample in first_of_each_task(samples, *args)]

    assert ids() == ids(3) == ["0", "1", "2", "3", "4", "5"]
    assert ids(1) == ["0", "1", "5"]
    assert ids(2, ["b", "c"]) == ["1", "3", "5"]
    assert first_of_each_task(iter(samples), 1) == [samples[0], samples[1], samples[5]]


def test_an_unknown_task_is_answered_with_the_tasks() -> None:
    with pytest.raises(UsageError, match="no task 'd' in the data; there are: b, a"):
        first_of_each_task(some("b", "a", "b"), None, ["a", "d"])
    with pytest.raises(UsageError, match="there is no sample in the data"):
        first_of_each_task([], None, ["a"])


def test_a_token_that_the_model_does_not_have_is_told_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines = ({"text": "a"}, {"prompt_ids": [299]}, {"prompt_ids": [1], "output_ids": [300]})
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text, within, beyond = read_samples(file)
    for sample in (text, within):
        sample.check_vocabulary(300, "toy")
    with pytest.raises(UsageError, match=rf"{file}:3 has token 300, and toy knows 300: .*--model"):
        beyond.check_vocabulary(300, "toy")
    with pytest.raises(UsageError, match="sample 'x' has token 9"):
        Sample("x", "chat", prompt_ids=(9, 1)).check_vocabulary(9, "toy")
    file.rename(tmp_path / "other.jsonl")
    assert digest(read_samples(tmp_path / "other.jsonl")) == digest([text, within, beyond])


def test_prompts_of_every_kind_are_encoded() -> None:
    tokenizer = toy_tokenizer()
    assert Sample("1", "t", text="abc").encode(tokenizer) == [ALPHABET.index(c) for c in "abc"]
    assert Sample("1", "t", prompt_ids=(3, 1)).encode(tokenizer) == [3, 1]
    sample = Sample("1", "t", user("a"), ("b", "c"))
    assert sample.num_turns == 3
    assert [m["content"] for m in sample.chat(["x"])] == ["a", "x", "b"]
    assert [m["role"] for m in sample.chat(["x", "y"])] == ["user", "assistant"] * 2 + ["user"]
