"""Exchange and StreamReader: times are per token, whatever a chunk brings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.evals.client.endpoint import StreamReader
from specdec.evals.client.exchange import Exchange
from tests.evals.virtual_time import exchange


def line(text: str | None = None, counted: int | None = None, **more: Any) -> bytes:
    """A chunk of a chat's stream; `counted` are the output tokens so far."""
    chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": text}, **more}]}
    if counted is not None:
        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": counted}
    return f"data: {json.dumps(chunk)}\n".encode()


def read(*lines: tuple[bytes, float]) -> Exchange:
    """A stream that was sent for at 100."""
    reader = StreamReader()
    reader.begin(100.0)
    for data, at in lines:
        reader.take(data, at)
    return reader.exchange(lines[-1][1] if lines else 100.0, 200, "ok", "")


def test_tokens_of_a_burst_share_its_time() -> None:
    found = read(
        (line("", 0), 100.1),  # the role: no token
        (line("a", 1), 100.2),
        (line("bc", 3), 100.6),
        (b": comment\n", 100.65),
        (b"\n", 100.66),
        (line("d", 4, finish_reason="length"), 100.7),
        (b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}', 100.8),
        (b"data: [DONE]", 100.9),
    )
    assert (found.outcome, found.text, found.finish_reason) == ("ok", "abcd", "length")
    assert (found.num_prompt, found.num_output) == (7, 4)
    assert found.ttft_s == pytest.approx(0.2)
    assert found.itls_s() == pytest.approx([0.2, 0.2, 0.1])
    assert found.tpot_s == pytest.approx(0.5 / 3)
    assert found.end_s == pytest.approx(0.9)


def test_text_that_a_server_held_back_brings_no_token() -> None:
    found = read(
        (line("a", 1), 100.1),
        (line("b", 1), 100.2),  # text of a token that was counted before
        (line("c", 3), 100.5),
        (line("", 4, finish_reason="stop"), 100.6),  # the end of the sequence: a token, no text
        (b"data: [DONE]", 100.6),
    )
    assert found.itls_s() == pytest.approx([0.2, 0.2, 0.1])


def test_chunks_without_counts_are_not_tokens() -> None:
    total = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}'
    found = read((line("ab"), 100.1), (line("cd"), 100.5), (total, 100.6), (b"data: [DONE]", 100.6))
    assert found.itls_s() is None
    assert found.num_output == 9
    assert found.tpot_s == pytest.approx(0.4 / 8)


@given(
    st.lists(
        st.tuples(st.floats(0.001, 1), st.integers(0, 5)).filter(lambda step: step[1] >= 0),
        max_size=20,
    )
)
def test_gaps_add_up_to_the_time_between_first_and_last_token(
    steps: list[tuple[float, int]],
) -> None:
    at, arrivals = 0.0, []
    for gap, number in steps:
        at += gap
        arrivals.append((at, number))
    gaps = exchange(*arrivals).itls_s()
    with_tokens = [(at, number) for at, number in arrivals if number]
    assert gaps is not None
    assert len(gaps) == sum(number for _, number in with_tokens[1:])
    if with_tokens:
        assert sum(gaps) == pytest.approx(with_tokens[-1][0] - with_tokens[0][0])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line("a", 1)], "in the middle"),
        ([], "in the middle"),
        ([line("a", 1), b'data: {"error": {"message": "the engine failed"}}'], "engine failed"),
        ([b"data: {not json"], "no chunk"),
        ([b"data: [1]", b"data: [DONE]"], "no chunk"),
    ],
)
def test_a_stream_that_breaks_off_is_an_error(lines: list[bytes], words: str) -> None:
    found = read(*((data, 100.0) for data in lines))
    assert found.outcome == "error"
    assert words in found.error
