"""Errors a user can meet; each message is one line that says what to do.

    SpecdecError                 exit code 1
    +-- UsageError               2   an option or argument is wrong
    +-- InvalidRequest           2   a request's field is wrong (HTTP 400; `param` names it)
    |   +-- ContextLengthExceeded
    +-- CheckpointError          3   missing, truncated, unsafe or unsupported checkpoint
    |   +-- UnsupportedModel
    +-- EngineStopped            4   the engine is gone and cannot serve
    +-- Overloaded               4   too much waits already (HTTP 503 with Retry-After)
    +-- DeadlineExceeded         4   it took longer than is allowed (HTTP 504)

`assert` is for our own bugs only; everything a user can cause raises one of these.
"""


class SpecdecError(Exception):
    """Base of every error that is meant for a user's eyes."""

    exit_code = 1


class UsageError(SpecdecError):
    """An option, argument or file given on the command line is wrong."""

    exit_code = 2


class InvalidRequest(SpecdecError):
    """A request cannot be honoured; `param` names the offending field."""

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit the model's context."""


class CheckpointError(SpecdecError):
    """A checkpoint is missing, damaged or not safe to load."""

    exit_code = 3


class UnsupportedModel(CheckpointError):
    """The checkpoint's architecture is not one the target model implements."""


class EngineStopped(SpecdecError):
    """The engine has stopped; start a new one."""

    exit_code = 4


class Overloaded(SpecdecError):
    """Too much waits already; ask again after `retry_after_s` seconds."""

    exit_code = 4

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(SpecdecError):
    """An answer took longer than the server allows."""

    exit_code = 4
