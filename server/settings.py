"""ServerSettings: every setting of the server that is not the engine's, frozen, validated once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields

from specdec.errors import UsageError


@dataclass(frozen=True)
class ServerSettings:
    """Times are in seconds, lengths in bytes; 0 turns a bound off where the comment says so.

    Example: `ServerSettings(api_keys=("secret",), max_queued_requests=32)`.
    Raises UsageError when a value makes no sense.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: everybody may ask
    cors_origins: tuple[str, ...] = ()  # none: pages of other sites may not
    strict_params: bool = False  # refuse unknown fields of a body
    force_usage: bool = False  # every stream includes usage
    request_templates: bool = False  # a request may bring its own chat template
    access_log: bool = False
    self_test: bool = True  # measure the speed-up before saying that the server is ready
    shadow: float = 0.0  # share of finished requests that are run again without speculation

    max_queued_requests: int = 256  # without a token yet; 0 = no bound
    max_queued_tokens: int = 262_144  # of their prompts; 0 = no bound
    rate_limit: float = 0.0  # requests per minute and key; 0 = no limit
    max_body_len: int = 32 * 2**20
    max_header_len: int = 32 * 2**10

    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    queue_timeout_s: float = 0.0  # until the engine begins; 0 = no limit
    first_token_timeout_s: float = 0.0  # 0 = no limit
    total_timeout_s: float = 0.0  # 0 = no limit
    send_timeout_s: float = 60.0  # of a client that reads nothing
    template_timeout_s: float = 5.0
    grace_s: float = 30.0  # for running answers after the first signal
    hang_s: float = 5.0  # silence of the engine that means it hangs; 0 = no limit

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{_words(item.name)} must be at least 0, not {value}")
        for name in _POSITIVE:
            if not getattr(self, name):
                raise UsageError(f"{_words(name)} must be more than 0")
        if self.shadow > 1:
            raise UsageError(f"shadow is a share and must be at most 1, not {self.shadow}")
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise UsageError("an API key must be printable ASCII and not empty")
        for origin in self.cors_origins:
            if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
                raise UsageError(
                    f"a CORS origin looks like https://example.org, without a path, not {origin!r}"
                )


# Without them a client could hold what it wants for as long as it wants.
_POSITIVE = (
    *("max_body_len", "max_header_len", "header_timeout_s", "body_timeout_s", "send_timeout_s"),
    "template_timeout_s",
)


def _words(name: str) -> str:
    """A setting as a message says it.

    Example: `_words("grace_s")` is "grace".
    """
    return name.removesuffix("_s").replace("_", " ")


DEFAULTS = ServerSettings()
