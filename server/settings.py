"""ServerSettings: every setting of the server that is not the engine's, frozen, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from specdec.errors import UsageError


@dataclass(frozen=True)
class ServerSettings:
    """Times are in seconds, lengths in bytes; 0 turns a bound off where the comment says so.

    Example: `ServerSettings(api_keys=("secret",), max_queued_requests=32)`.
    Raises UsageError when a value makes no sense.
    """

    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    cors_origins: tuple[str, ...] = ()  # none: pages of other sites may not
    strict_params: bool = False  # refuse unknown fields of a body
    force_usage: bool = False  # every stream includes usage
    request_templates: bool = False  # a request may bring its own chat template
    access_log: bool = False

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
    hang_s: float = 5.0  # silence of the engine that means it hangs

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not (value >= 0 and math.isfinite(value)):
                name = field.name.removesuffix("_s").replace("_", " ")
                raise UsageError(f"{name} must be at least 0, not {value}")
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise UsageError("an API key must be printable ASCII and not empty")


DEFAULTS = ServerSettings()
