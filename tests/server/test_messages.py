"""Messages: what crosses the socket arrives as it was, in pieces of any size."""

from __future__ import annotations

import socket
import threading

import pytest

from specdec import errors
from specdec.config import EngineConfig
from specdec.limits import SpeculationLimits
from specdec.params import SamplingParams
from specdec.request import RejectedNode, TokenRecord
from specdec.server.channel import Channel
from specdec.server.framing import HEADER_LEN, MAX_FRAME_LEN, encode_frame, frame_len
from specdec.server.messages import (
    Abort,
    Alive,
    Count,
    Explain,
    Explanation,
    Failed,
    Output,
    Ping,
    Ready,
    Shutdown,
    Start,
    Submit,
    ToEngine,
    Tokens,
    ToServer,
    decode_to_engine,
    decode_to_server,
    revive_error,
)

PARAMS = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    logit_bias={3: -1.5},
    bad_words=((1, 2), (3,)),
    allowed_token_ids=frozenset({4, 5}),
    stop=("a", "b"),
    stop_token_ids=frozenset({6}),
    seed=2**64 - 1,
    logprobs=2,
)
TO_ENGINE: list[ToEngine] = [
    Start(EngineConfig(model="m", drafter="none", threads=2)),
    Submit("q", (1,), PARAMS),
    Submit(
        *("r", (1, 2, 3), PARAMS),
        priority=-1,
        cache_salt="s",
        speculation=SpeculationLimits(4, 2, ("suffix",)),
        prediction_ids=(7, 8),
    ),
    Abort("r"),
    Explain(1, 20),
    Count(2),
    Ping(),
    Shutdown(),
]
RECORD = TokenRecord(5, ("ngram",), 1, 0, logprob=-0.5, top_logprobs=((5, -0.5), (6, -1.0)))
TO_SERVER: list[ToServer] = [
    Ready("m", "/folder", "ngram", 100, 50, (1,), longest_step_s=1.5),
    Tokens([Output("r", [RECORD], "stop", stats={"a": [1, 2]}, num_prefix_hit=16), Output("s")]),
    Explanation(1, {"control": "adaptive", "decisions": [{"step": 1, "gain": 1.5}]}),
    Explanation(2, error="why"),
    Alive(),
    Failed("CheckpointError", "why"),
]


def test_every_message_survives_the_way() -> None:
    for message in TO_ENGINE:
        assert decode_to_engine(encode_frame(message)[HEADER_LEN:]) == message
    for answer in TO_SERVER:
        assert decode_to_server(encode_frame(answer)[HEADER_LEN:]) == answer


def test_drafters_are_known_by_name() -> None:
    assert Ready("m", "", "suffix, medusa=a=b/", 100, 50).drafters == ["suffix", "medusa"]
    assert Ready("m", "", "none", 100, 50).drafters == ["none"]


def test_a_header_that_cannot_be_ours_is_refused() -> None:
    assert frame_len(encode_frame(Shutdown())[:HEADER_LEN]) > 0
    assert frame_len(MAX_FRAME_LEN.to_bytes(HEADER_LEN, "big")) == MAX_FRAME_LEN
    with pytest.raises(ValueError, match="too long"):
        frame_len((MAX_FRAME_LEN + 1).to_bytes(HEADER_LEN, "big"))


@pytest.mark.parametrize("piece_len", [1, 3, 10_000])
def test_the_channel_puts_pieces_together(piece_len: int) -> None:
    ours, theirs = socket.socketpair()
    data = b"".join(map(encode_frame, TO_ENGINE))

    def write() -> None:
        for start in range(0, len(data), piece_len):
            theirs.sendall(data[start : start + piece_len])
        theirs.close()

    writer = threading.Thread(target=write)
    with ours:
        channel = Channel(ours)
        assert channel.receive(is_blocking=False) == []
        writer.start()
        received = []
        while not channel.is_closed:
            received += channel.receive(is_blocking=True)
    writer.join()
    assert received == TO_ENGINE


def test_an_output_takes_in_a_later_one() -> None:
    first = Output("r", [RECORD], num_prefix_hit=16)
    first.merge(Output("r", [RECORD, RECORD], "length", stats={}))
    assert first == Output("r", [RECORD] * 3, "length", stats={}, num_prefix_hit=16)


def test_errors_come_back_as_what_they_were() -> None:
    refused = revive_error("ContextLengthExceeded", "too long", "prompt")
    assert isinstance(refused, errors.ContextLengthExceeded)
    assert (str(refused), refused.param) == ("too long", "prompt")
    assert type(revive_error("CheckpointError", "m")) is errors.CheckpointError
    assert type(revive_error(None, "m")) is errors.SpecdecError
    for strange in ("annotations", "Nothing", "__name__"):
        assert type(revive_error(strange, "m")) is errors.EngineStopped


def test_an_output_takes_in_all_that_a_later_one_says() -> None:
    token, node = TokenRecord(1, ("a",), 1, 0), RejectedNode(2, ("b",), 1, 0)
    output = Output("r", [token], num_prefix_hit=16, rejected=[node], has_begun=True, seed=7)
    later = Output("r", [token, token], "stop", stats={"num_steps": 2}, rejected=[node])
    output.merge(later)
    assert output == Output(
        *("r", [token] * 3, "stop"),
        stats={"num_steps": 2},
        num_prefix_hit=16,
        rejected=[node, node],
        has_begun=True,
        seed=7,
    )
    output.merge(Output("r", [], "error", "no", "InvalidRequest", "seed"))
    assert (output.finish_reason, output.error, output.error_kind) == (
        *("error", "no"),
        "InvalidRequest",
    )
    assert output.error_param == "seed"
