"""Typed messages between the server process and the engine process.

server -> engine    Start  Submit  Abort  Explain  Count  Ping  Shutdown
engine -> server    Ready  Tokens  Explanation  Alive  Failed
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from specdec import errors
from specdec.config import EngineConfig
from specdec.errors import EngineStopped, InvalidRequest, SpecdecError
from specdec.limits import SpeculationLimits
from specdec.params import SamplingParams
from specdec.request import FinishReason, RejectedNode, TokenRecord
from specdec.server.engine_facts import EngineFacts


class Start(Struct, tag=True):
    """First message to a new engine process: build this engine."""

    config: EngineConfig
    is_tested: bool = False  # measure its speed before it is ready


class Submit(Struct, tag=True):
    """Run a request. The answer is an output: an empty one if it was accepted, else an error."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    speculation: SpeculationLimits = SpeculationLimits()
    prediction_ids: tuple[int, ...] = ()
    keeps_rejected: bool = False
    is_shadow: bool = False  # see specdec.request.Request


class Abort(Struct, tag=True):
    """Stop a request; unknown and finished ones are ignored."""

    request_id: str


class Explain(Struct, tag=True):
    """Say what the controller decides and why; the answer comes before the next step."""

    question_id: int
    max_decisions: int


class Count(Struct, tag=True):
    """Say what the engine has counted so far; the answer comes before the next step."""

    question_id: int


class Ping(Struct, tag=True):
    """Give a sign of life; the answer, `Alive`, comes before the next step."""


class Shutdown(Struct, tag=True):
    """Leave at once; what runs is lost."""


class Ready(Struct, tag=True):
    """The engine is built and takes requests.

    `longest_step_s` is how long one of its steps may take for good reason; 0 where that is unknown.
    """

    model_name: str
    folder: str  # where the model's tokenizer is
    drafter: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    longest_step_s: float = 0.0
    fingerprint: str = ""  # of what can change tokens
    node_budget: int = 0
    reason: str = ""  # how what the configuration left open was settled, and why
    facts: EngineFacts | None = None

    @property
    def drafters(self) -> list[str]:
        """Names of the drafters that run.

        Example: the drafter "suffix,medusa=heads/" has the names suffix and medusa.
        """
        return [item.partition("=")[0].strip() for item in self.drafter.split(",")]


class Output(Struct):
    """News of one request: RequestOutput as it travels, plus why a request was refused.

    `error_kind` names a class of `specdec.errors` and `error_param` the field at fault.
    """

    request_id: str
    tokens: list[TokenRecord] = []
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_kind: str | None = None
    error_param: str | None = None
    stats: dict[str, Any] | None = None  # the wire form, on the last output
    num_prefix_hit: int = 0
    rejected: list[RejectedNode] = []  # of a request that keeps them
    has_begun: bool = False  # said once, when the engine first computes a part of it
    seed: int | None = None  # said once, of a request that was accepted: given or drawn

    def merge(self, later: Output) -> None:
        """Take in a later output of the same request that was not fetched in time."""
        self.tokens.extend(later.tokens)
        self.rejected.extend(later.rejected)
        self.finish_reason = later.finish_reason
        self.error, self.error_kind = later.error, later.error_kind
        self.error_param, self.stats = later.error_param, later.stats
        self.num_prefix_hit = max(self.num_prefix_hit, later.num_prefix_hit)
        self.has_begun |= later.has_begun


class Tokens(Struct, tag=True):
    """What one step brought, for every request that it touched."""

    outputs: list[Output]


class Explanation(Struct, tag=True):
    """What `explain()` of the engine's controller said, with the newest decisions it was asked for;
    or, to a Count, what `count()` of the engine said.

    `error` is the line for the user when it could not say anything.
    """

    question_id: int
    facts: dict[str, Any] = {}
    error: str | None = None


class Alive(Struct, tag=True):
    """A sign of life: the answer to a Ping."""


class Failed(Struct, tag=True):
    """The engine cannot start or go on; the engine process ends after this message.

    `kind` names a class of `specdec.errors`, the message is its one line for the user.
    """

    kind: str
    message: str


ToEngine = Start | Submit | Abort | Explain | Count | Ping | Shutdown
ToServer = Ready | Tokens | Explanation | Alive | Failed

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_server = msgspec.msgpack.Decoder(ToServer)


def decode_to_engine(body: bytes) -> ToEngine:
    """Decode a frame's body in the engine process; msgspec.DecodeError when it is damaged."""
    return _to_engine.decode(body)


def decode_to_server(body: bytes) -> ToServer:
    """Decode a frame's body in the server process; msgspec.DecodeError when it is damaged."""
    return _to_server.decode(body)


def revive_error(kind: str | None, message: str, param: str | None = None) -> SpecdecError:
    """The error that a message from the engine process describes.

    Example: `revive_error("InvalidRequest", "too long", "stop")`; no kind is a plain SpecdecError.
    """
    found = getattr(errors, kind or SpecdecError.__name__, None)
    if not (isinstance(found, type) and issubclass(found, SpecdecError)):
        return EngineStopped(message)
    return found(message, param=param) if issubclass(found, InvalidRequest) else found(message)
