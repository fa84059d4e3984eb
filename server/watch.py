"""Watch: a running server's speculation decisions, for `specdec info --watch`."""

from __future__ import annotations

import json
import sys
import time
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from rich.console import Console
from rich.live import Live

from specdec.errors import EngineStopped, SpecdecError, UsageError
from specdec.server.explanation_view import as_text, plain, view

DEFAULT_URL = "http://127.0.0.1:8000"
INTERVALS_S = (0.1, 3600.0)  # shortest and longest
WAIT_S = 10.0  # longer than the server waits for its engine
NUM_DECISIONS = 20  # of a snapshot and of a line of JSON
PLAIN_WIDTH = 120  # characters, where there is no terminal to ask


def watch(url: str = DEFAULT_URL, *, interval_s: float = 1.0, as_json: bool = False) -> None:
    """Show what a server's controller decides, until Ctrl-C.

    On a terminal the view is renewed in place every `interval_s` seconds; elsewhere it is printed
    once. As JSON it is one document to a line, again until Ctrl-C.

    Raises UsageError for a URL or an interval that cannot be meant, EngineStopped when the server
    is not there or cannot answer now.
    Example: `watch("http://127.0.0.1:8000", interval_s=0.5)`.
    """
    shortest, longest = INTERVALS_S
    if not shortest <= interval_s <= longest:
        raise UsageError(
            f"--interval must be between {shortest:g} and {longest:g} seconds, not {interval_s:g}"
        )
    if as_json:
        while True:
            print(json.dumps(fetch(url)), flush=True)
            time.sleep(interval_s)
    if not sys.stdout.isatty() or Console().is_dumb_terminal:
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        print(as_text(fetch(url), Console(force_terminal=False, width=width)))
        return
    console = Console()
    shown = view(fetch(url))  # what is wrong from the start is told without clearing the screen
    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(view(fetch(url, max(4, console.height // 3))), refresh=True)
            time.sleep(interval_s)


def fetch(url: str, num_decisions: int = NUM_DECISIONS) -> dict[str, Any]:
    """GET /debug/speculation of the server at `url`, with its newest decisions; not by a proxy.

    Raises UsageError, EngineStopped, SpecdecError.
    Example: `fetch("http://127.0.0.1:8000")["reasons"]`.
    """
    _check(url)
    address = f"{url.rstrip('/')}/debug/speculation?last={num_decisions}"
    try:
        with build_opener(ProxyHandler({})).open(address, timeout=WAIT_S) as response:
            facts = json.load(response)
    except HTTPError as error:
        with error:
            raise _refusal(url, error) from None
    except (ValueError, RecursionError):
        facts = None
    except (OSError, HTTPException) as error:
        reason = plain(str(getattr(error, "reason", None) or error or type(error).__name__))
        raise EngineStopped(
            f"no server answers at {url}: {reason}; start it with `specdec serve` or give --url"
        ) from None
    if not (isinstance(facts, dict) and isinstance(facts.get("decisions"), list)):
        raise UsageError(f"what answers at {url} is no specdec server; give another --url")
    return facts


def _check(url: str) -> None:
    """Raise UsageError unless it is a server's URL."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not (is_usable and url.isascii() and url.isprintable() and " " not in url):
        raise UsageError(f"--url must be like {DEFAULT_URL}, not {url!r}")


def _refusal(url: str, error: HTTPError) -> SpecdecError:
    """What an answer with an error status means for who watches."""
    try:
        message = plain(json.load(error)["error"]["message"])[:300]
    except (ValueError, RecursionError, KeyError, TypeError, OSError, HTTPException):
        message = ""
    if error.code == 503:
        return EngineStopped(f"the server at {url} cannot answer now: {message or error.reason}")
    if error.code == 500 and message:
        return SpecdecError(f"the server at {url} failed: {message}")
    return UsageError(
        f"what answers at {url} (status {error.code}) does not explain speculation; "
        "give another --url"
    )
