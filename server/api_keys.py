"""API keys: where they come from, and the middleware that asks for one before every route."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.errors import UsageError
from specdec.server.caller import caller_in
from specdec.server.json_response import error_response
from specdec.server.responses import HttpError

VARIABLE = "SPECDEC_API_KEYS"
MAX_FILE_LEN = 2**20

_NO_KEY = HttpError(
    401,
    "a valid API key is needed: send the header Authorization: Bearer KEY",
    "authentication_error",
    code="invalid_api_key",
)


def load_keys(file: Path | None, environ: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """The keys of a file, a line each, and those of SPECDEC_API_KEYS, separated by commas.

    Lines that begin with # are comments. The variable is taken out of the environment, so that no
    child inherits it. Says on stderr when others may read the file.

    Raises UsageError for a file that cannot be read, and for a file or a variable without a key:
    who names one does not want a server that everybody may ask.
    Example: `load_keys(Path("keys.txt"))`.
    """
    keys: list[str] = []
    if file is not None:
        keys += _keys_of(file)
    if VARIABLE in environ:
        words = [word.strip() for word in environ.pop(VARIABLE).split(",")]
        if not any(words):
            raise UsageError(f"{VARIABLE} holds no key; unset it to need none")
        keys += filter(None, words)
    return tuple(dict.fromkeys(keys))


def _keys_of(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(MAX_FILE_LEN + 1).decode("ascii")
    except OSError as error:
        raise UsageError(
            f"cannot read the API keys in {file}: {(error.strerror or str(error)).lower()}"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{file}: an API key must be printable ASCII") from None
    if len(text) > MAX_FILE_LEN:
        raise UsageError(f"{file} is too long for a file of API keys")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        print(f"warning: others may read {file}; chmod 600 helps", file=sys.stderr)
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{file} holds no API key; write one to a line")
    return keys


class ApiKeyMiddleware:
    """Asks for a key before everything but `GET /health`, unknown paths included.

    It looks at the path as it came, so that no way of writing one leads around it. A key comes as
    `Authorization: Bearer KEY`, or with Basic as the password, so that a browser can open the
    chat page.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._secret = secrets.token_bytes(32)  # of this process: a tenant's name tells nothing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not (self._digests and scope["type"] == "http") or _is_open(scope):
            await self.app(scope, receive, send)
            return
        digest = self._known(_key_in(scope))
        if digest is None:
            refusal = error_response(_NO_KEY, {"WWW-Authenticate": _challenge(scope)})
            await refusal(scope, receive, send)
        else:
            tenant = hashlib.blake2b(digest, key=self._secret, digest_size=16)
            caller_in(scope).tenant = tenant.hexdigest()
            await self.app(scope, receive, send)

    def _known(self, key: bytes) -> bytes | None:
        """The digest of a key that is one of ours; it takes equally long for every key."""
        asked = hashlib.sha256(key).digest()
        found = None
        for digest in self._digests:
            if secrets.compare_digest(digest, asked):
                found = digest
        return found


def _is_open(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") and scope["raw_path"] == b"/health"


def _key_in(scope: Scope) -> bytes:
    """The key that came; an empty one, which none is, where it is malformed."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return b""
    scheme, _, rest = values[0].strip().partition(b" ")
    rest = rest.strip()
    if scheme.lower() == b"bearer":
        return bytes(rest)
    if scheme.lower() == b"basic":
        try:
            found: bytes = base64.b64decode(rest, validate=True)
            return found.partition(b":")[2]
        except binascii.Error:
            pass
    return b""


def _challenge(scope: Scope) -> str:
    """Makes a browser ask for a password where a person opens a page; programs are told Bearer."""
    path: bytes = scope["raw_path"]
    is_page = path in (b"/", b"/dashboard") or path.startswith(b"/page/")
    return f'{"Basic" if is_page else "Bearer"} realm="specdec"'
