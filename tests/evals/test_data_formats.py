"""Samples from files: every format is read, every fault names its line and what to do."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from specdec.errors import UsageError
from specdec.evals.data.formats import read_all, read_samples
from specdec.evals.data.sample import Sample, first_of_each_task

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def write(folder: Path, *lines: dict[str, Any] | str, end: str = "\n") -> Path:
    file = folder / "data.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_bytes("".join(text + end for text in texts).encode())
    return file


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


# --- what is read ---

READ: dict[str, tuple[dict[str, Any], Sample]] = {
    "Spec-Bench": (
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["r"]},
        Sample("81", "chat", user("a"), ("b",)),
    ),
    "Spec-Bench's maths": (
        {"question_id": 480, "category": "math_reasoning", "turns": ["a"]},
        Sample("480", "math", user("a")),
    ),
    "SPEED-Bench": (
        {
            "question_id": "5f0c9d",
            "category": "coding",
            "sub_category": None,
            "turns": ["a", "b"],
            "source": "x/y",
            "src_id": "1",
            "difficulty": None,
            "multiturn": True,
        },
        Sample("5f0c9d", "coding", user("a"), ("b",)),
    ),
    "SPEED-Bench as NeMo-Skills has it": (
        {"question_id": "5f", "category": "rag", "messages": [*user("a"), *user("b"), *user("c")]},
        Sample("5f", "rag", user("a"), ("b", "c")),
    ),
    "chat": (
        {"messages": [{"role": "system", "content": "s"}, USER]},
        Sample("line 1", "untold", ({"role": "system", "content": "s"}, USER)),
    ),
    "chat that goes on": (
        {"messages": [USER, ANSWER, USER], "id": 7, "task": "t"},
        Sample("7", "t", (USER, ANSWER, USER)),
    ),
    "turns after a system prompt": (
        {"messages": [{"role": "system", "content": "s"}, USER, USER]},
        Sample("line 1", "untold", ({"role": "system", "content": "s"}, USER), ("Hi",)),
    ),
    "recorded chat": (
        {"messages": [USER, ANSWER]},
        Sample("line 1", "untold", (USER,), output="Hello"),
    ),
    "prompt": (
        {"prompt": "p", "id": "x", "category": "c", "task": None},
        Sample("x", "c", user("p")),
    ),
    "recorded prompt": (
        {"prompt": "p", "output": ""},
        Sample("line 1", "untold", user("p"), output=""),
    ),
    "text": ({"text": "t", "output": "o"}, Sample("line 1", "untold", text="t", output="o")),
    "token ids": (
        {"prompt_ids": [1, 2], "output_ids": [3]},
        Sample("line 1", "untold", prompt_ids=(1, 2), output_ids=(3,)),
    ),
    "fields that are null": (
        {"prompt": "p", "text": None, "id": None, "question_id": 5, "output": None},
        Sample("5", "untold", user("p")),
    ),
    "another's question of Spec-Bench's number": (
        {"question_id": 81, "category": "qa", "turns": ["a"]},
        Sample("81", "qa", user("a")),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_every_format_is_read(tmp_path: Path, name: str) -> None:
    fields, expected = READ[name]
    assert read_samples(write(tmp_path, fields)) == [expected]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_blank_lines_and_a_byte_order_mark_change_nothing(
    tmp_path: Path, end: str, mark: str
) -> None:
    file = write(tmp_path, f'{mark}{{"prompt": "a"}}', "", "  ", {"prompt": "b"}, end=end)
    assert [(s.sample_id, s.messages) for s in read_samples(file)] == [
        ("line 1", user("a")),
        ("line 4", user("b")),
    ]
    file.write_bytes(file.read_bytes().rstrip())  # no end of the last line
    assert len(read_samples(file)) == 2


def test_other_line_separators_are_text(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    file = write(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False))
    assert read_samples(file)[0].messages == user(text)


def test_whole_characters_may_be_escaped(tmp_path: Path) -> None:
    file = write(tmp_path, '{"prompt": "\\ud83d\\ude00 \\u00e9"}')
    assert read_samples(file)[0].messages == user("\U0001f600 é")


# --- what is refused ---

REFUSED: dict[str, tuple[dict[str, Any] | str, str]] = {
    "no JSON": ("{'prompt': 1}", "this is not one JSON object on one line"),
    "two objects": ('{"prompt": "a"} {"prompt": "b"}', "not one JSON object on one line"),
    "a list over lines": ("[", "not one JSON object on one line"),
    "a list": ("[1]", "a line must be a JSON object"),
    "no number": ('{"prompt": "a", "reference": NaN}', "NaN is not JSON: write null"),
    "endless": ('{"prompt": "a", "score": -Infinity}', "-Infinity is not JSON"),
    "too many digits": ('{"prompt": "a", "id": ' + "1" * 5000 + "}", "too many digits"),
    "too deep": ('{"prompt": ' + "[" * 100_000 + "}", "nested too deep"),
    "half a character": ('{"prompt": "\\ud83d"}', "half of a character"),
    "half a name": ('{"messages": [{"role": "user", "content": "a", "\\ude00": 1}]}', "half of a"),
    "no prompt": ({"question": "a"}, "turns, messages, prompt, text, prompt_ids is needed"),
    "only null": ({"prompt": None}, "is needed"),
    "two prompts": ({"prompt": "a", "text": "b"}, "only one of prompt and text"),
    "turns of text": ({"turns": "a"}, "turns must be a list of texts"),
    "no turns": ({"turns": []}, "turns must be a list of texts"),
    "an empty turn": ({"turns": ["a", ""]}, "turns must be a list of texts"),
    "a number as a turn": ({"turns": [1]}, "turns must be a list of texts"),
    "placeholder": ({"turns": [PLACEHOLDER]}, "fetch it with prepare_data.py"),
    "later placeholder": ({"turns": ["a", f"{PLACEHOLDER}\n\nb"]}, "fetch it with prepare_data.py"),
    "placeholder in a message": ({"messages": [*user(PLACEHOLDER)]}, "prepare_data.py"),
    "placeholder in the last": ({"messages": [USER, *user(PLACEHOLDER)]}, "prepare_data.py"),
    "messages of text": ({"messages": "a"}, "messages must be a list"),
    "no messages": ({"messages": []}, "messages must be a list"),
    "a message without a role": ({"messages": [{"content": "a"}]}, "a role and a content"),
    "a message of parts": ({"messages": [{"role": "user", "content": []}]}, "both text"),
    "only an answer": ({"messages": [ANSWER]}, "only an assistant's message"),
    "a number as a prompt": ({"prompt": 1}, "prompt must be text"),
    "an empty prompt": ({"prompt": ""}, "prompt is empty"),
    "an empty text": ({"text": ""}, "text is empty"),
    "no tokens": ({"prompt_ids": []}, "prompt_ids is empty"),
    "a negative token": ({"prompt_ids": [-1]}, "prompt_ids must be a list of token ids"),
    "a token as truth": ({"prompt_ids": [True]}, "prompt_ids must be a list of token ids"),
    "a huge token": ({"prompt_ids": [10**400]}, "prompt_ids must be a list of token ids"),
    "an output of tokens": ({"prompt": "a", "output": [1]}, "output must be text"),
    "output_ids of text": ({"prompt": "a", "output_ids": "a"}, "output_ids must be a list"),
    "two outputs": ({"prompt": "a", "output": "b", "output_ids": [1]}, "only one of output"),
    "an output of several turns": ({"turns": ["a", "b"], "output": "c"}, "belongs to one turn"),
    "two recordings": ({"messages": [USER, ANSWER], "output": "b"}, "the answer is the last"),
    "an id that is not whole": ({"prompt": "a", "id": 1.5}, "id must be text or a whole number"),
    "an id as truth": ({"prompt": "a", "question_id": True}, "question_id must be text or"),
    "a task of numbers": ({"prompt": "a", "task": 1}, "task must be text"),
    "an empty task": ({"prompt": "a", "category": ""}, "task must be text"),
    "the task of all": ({"prompt": "a", "task": "all"}, "give the task another name"),
    "a seed below zero": ({"prompt": "a", "seed": -1}, "seed must be a number from 0"),
    "a seed as truth": ({"prompt": "a", "seed": True}, "seed must be a number from 0"),
    "a turn of a number": ({"prompt": "a", "turn_of": 5}, "turn_of must be text"),
    "a known id": ({"prompt": "b", "id": 0}, "the id '0' is that of line 2 too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_fault_names_its_line(tmp_path: Path, name: str) -> None:
    line, reason = REFUSED[name]
    file = write(tmp_path, "", {"prompt": "first", "id": "0"}, line)
    with pytest.raises(UsageError) as caught:
        read_samples(file)
    message = str(caught.value)
    assert message.startswith(f"{file}:3: ")
    assert reason in message
    assert "\n" not in message and len(message) < 300


def test_an_id_must_not_be_the_name_of_another_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r":2: the id 'line 1' is that of line 1 too"):
        read_samples(write(tmp_path, {"prompt": "a"}, {"prompt": "b", "id": "line 1"}))


def test_text_in_another_encoding_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(UsageError, match=r"data\.jsonl:2: this is not UTF-8 text: save it"):
        read_samples(file)
    file.write_bytes('{"prompt": "a"}\n'.encode("utf-16"))
    with pytest.raises(UsageError, match=r"data\.jsonl:1: this is not UTF-8 text"):
        read_samples(file)


def test_what_is_no_such_file_is_named(tmp_path: Path) -> None:
    empty = write(tmp_path, "", " ")
    for file, reason in {
        tmp_path: "Is a directory",
        tmp_path / "none": "No such file",
        empty: "has no samples",
    }.items():
        with pytest.raises(UsageError, match=reason) as caught:
            read_samples(file)
        assert str(file) in str(caught.value)


def test_parquet_is_told_how_it_becomes_lines(tmp_path: Path) -> None:
    file = tmp_path / "test.parquet"
    file.write_bytes(b"PAR1\x15\x04\x15")
    with pytest.raises(UsageError, match="is Parquet: write its rows as JSON lines"):
        read_samples(file)


fields_of_samples = st.dictionaries(
    st.sampled_from(
        (
            *("turns", "messages", "prompt", "text", "prompt_ids", "output", "output_ids"),
            *("id", "question_id", "task", "category", "role", "content"),
        )
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(("role", "content")), inner, max_size=3)
        ),
        max_leaves=5,
    ),
    max_size=4,
)
some_lines = st.lists(
    st.binary(max_size=40) | fields_of_samples.map(lambda fields: json.dumps(fields).encode()),
    max_size=3,
)


@given(some_lines.map(b"\n".join) | st.binary(max_size=60))
@example(b"\xff\xfe")
@example(b"\xef\xbb\xbf")
@example(b'{"question_id": [], "prompt": "a", "category": {}}')
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_are_samples_or_a_usage_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "any.jsonl"
    file.write_bytes(content)
    try:
        samples = read_samples(file)
    except UsageError as refused:
        samples = []
        reasons = [str(refused)]
    else:
        reasons = []
    assert bool(samples) != any(str(file) in reason for reason in reasons)
    assert len(samples) == len({sample.sample_id for sample in samples})
    for sample in samples:
        assert sample.task
        parts = (sample.messages, sample.text, sample.prompt_ids)
        assert sum(bool(part) for part in parts) == 1
        assert sample.output is None or sample.output_ids is None
        json.dumps([sample.chat(), sample.later_turns, sample.text], ensure_ascii=False).encode()


# --- several files, and choosing among samples ---


def test_ids_that_two_files_have_get_the_files_names(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text('{"prompt": "1"}\n{"prompt": "2", "id": "x"}')
    files[1].write_text('{"prompt": "3"}\n{"prompt": "4", "id": "y"}')
    ids = [sample.sample_id for sample in read_all(files)]
    assert ids == [f"{files[0]}:line 1", "x", f"{files[1]}:line 1", "y"]
    with pytest.raises(UsageError, match=r"a\.jsonl is given twice"):
        read_all([files[0], files[0]])
    assert read_all([]) == []


# --- the real file ---


def test_spec_bench_is_480_questions_of_six_tasks() -> None:
    name = "SPECDEC_SPEC_BENCH"
    if name not in os.environ:
        pytest.skip(f"set {name} to Spec-Bench's question.jsonl to read the real file")
    samples = read_samples(Path(os.environ[name]))
    assert Counter(sample.task for sample in samples) == dict.fromkeys(
        ("chat", "translation", "summary", "qa", "math", "rag"), 80
    )
    assert [sample.sample_id for sample in samples] == [str(number) for number in range(81, 561)]
    assert all(sample.num_turns == (2 if sample.task == "chat" else 1) for sample in samples)
    assert [s.sample_id for s in first_of_each_task(samples, 1)] == [
        *("81", "161", "241", "321", "401", "481")
    ]
