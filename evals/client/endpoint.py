"""Endpoint: an OpenAI-compatible server that is asked for streams."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from specdec.errors import UsageError
from specdec.evals.client.exchange import Arrival, Exchange, Outcome
from specdec.metrics import SpeculationStats

if TYPE_CHECKING:  # an extra
    from aiohttp import ClientResponse

OVERLOADED = (429, 503)
_KEY_WANTED = (401, 403)
_DONE = "[DONE]"
_LONGEST_ERROR = 300  # characters of a server's error that are kept


class Endpoint:
    """Opens connections as they are needed; `timeout_s` bounds one whole answer.

    `url` is the server's address, with or without /v1. Raises UsageError for what is no such
    address, or if aiohttp is not installed. `asks_counts` may be set to False for a server that
    refuses the field by which it is asked to count tokens as it goes.

    Example:
        async with Endpoint("http://127.0.0.1:8000") as endpoint:
            model = await endpoint.model()
            body = {"model": model, "messages": messages, "max_tokens": 64}
            print((await endpoint.ask("/chat/completions", body)).ttft_s)
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        try:
            import aiohttp
        except ImportError:
            raise UsageError(
                "asking a server needs aiohttp: pip install 'specdec-server[evals]'"
            ) from None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"{url} is no address of a server: it begins with http:// or https://")
        self._aiohttp = aiohttp
        self.root = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        self.asks_counts = True

    async def __aenter__(self) -> Self:
        # Its own bound of 100 connections would queue requests here, unseen.
        connector = self._aiohttp.TCPConnector(limit=0)
        self._session = self._aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=self._timeout
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def model(self) -> str:
        """The id of the first model served. Raises UsageError if nobody answers as one should."""
        found = await self.get_json("/v1/models")
        try:
            return str(found["data"][0]["id"])
        except (LookupError, TypeError):
            raise UsageError(
                f"{self.root}/v1/models names no model: say which one is meant"
            ) from None

    async def get_json(self, path: str) -> Any:
        """What a GET answers. Raises UsageError, with the status, for what is not JSON."""
        try:
            async with self._session.get(self.root + path) as answer:
                return await self._json(answer, path)
        except (self._aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = str(error) or "it took too long"
            raise UsageError(f"no server answers at {self.root}{path}: {reason}") from None

    async def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """What a POST answers that is no stream. Raises UsageError for what is not JSON."""
        try:
            async with self._session.post(self.root + path, json=body) as answer:
                return await self._json(answer, path)
        except (self._aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = str(error) or "it took too long"
            raise UsageError(f"no server answers at {self.root}{path}: {reason}") from None

    async def _json(self, answer: ClientResponse, path: str) -> Any:
        if answer.status == 200:
            return json.loads(await answer.read())
        words = (await answer.text())[:_LONGEST_ERROR].strip()
        hint = "; give its --api-key" if answer.status in _KEY_WANTED else ""
        raise UsageError(f"{self.root}{path} answers {answer.status}{hint}: {words}")

    async def get_text(self, path: str) -> str | None:
        """What a GET answers, as `/metrics`; None if the server has no such route."""
        try:
            async with self._session.get(self.root + path) as answer:
                return await answer.text() if answer.status == 200 else None
        except (self._aiohttp.ClientError, TimeoutError):
            return None

    async def ask(self, route: str, body: Mapping[str, Any]) -> Exchange:
        """Send one request below /v1 and read its stream to the end; nothing is raised.

        The stream is asked to count tokens as it goes (vLLM's continuous_usage_stats).
        """
        options = {"include_usage": True}
        if self.asks_counts:
            options["continuous_usage_stats"] = True
        asked = {**body, "stream": True, "stream_options": options}
        reader = StreamReader()
        status, outcome, error = 0, "ok", ""
        sent_at = time.perf_counter()
        reader.begin(sent_at)
        try:
            async with self._session.post(f"{self.root}/v1{route}", json=asked) as answer:
                status = answer.status
                if status == 200:
                    async for line in answer.content:
                        reader.take(line, time.perf_counter())
                else:
                    outcome = "overloaded" if status in OVERLOADED else "error"
                    error = (await answer.text())[:_LONGEST_ERROR]
        except (self._aiohttp.ClientError, TimeoutError, OSError) as caught:
            outcome, error = "error", f"{type(caught).__name__}: {caught}"[:_LONGEST_ERROR]
        except ValueError as caught:  # a line longer than aiohttp reads
            outcome, error = "error", f"the stream cannot be read: {caught}"[:_LONGEST_ERROR]
        return reader.exchange(time.perf_counter(), status, outcome, error)  # type: ignore[arg-type]  # the three words of Outcome


class StreamReader:
    """Takes in a stream line by line.

    Example: `reader.begin(0.0); reader.take(b"data: [DONE]", 0.5)`.
    """

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []
        self._parts: list[str] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._stats: SpeculationStats | None = None
        self._error = ""
        self._is_done = False
        self._sent_at = 0.0
        self._num_counted = 0  # tokens, by the last usage

    def begin(self, sent_at: float) -> None:
        """The request goes out now."""
        self._sent_at = sent_at

    def take(self, line: bytes, now: float) -> None:
        """One line of the event stream; comments, blank lines and other fields say nothing."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == _DONE.encode():
            self._is_done = True
            return
        try:
            chunk = json.loads(data)
            self._chunk(chunk, now)
        except (ValueError, TypeError, AttributeError, LookupError):
            self._error = self._error or f"no chunk of a stream: {data[:80]!r}"

    def _chunk(self, chunk: dict[str, Any], now: float) -> None:
        if chunk.get("error"):
            self._error = json.dumps(chunk["error"])[:_LONGEST_ERROR]
            return
        usage = chunk.get("usage")
        speculation = (chunk.get("metrics") or {}).get("speculative_decoding")
        if speculation:
            self._stats = _stats(speculation)
        text, is_content = "", False
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            piece = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            text += piece or ""
            token_ids = choice.get("token_ids") or ()
            self._token_ids += token_ids
            is_content = is_content or bool(piece) or bool(token_ids)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        num_new: int | None = None
        if usage:
            self._usage = usage
            num_new = usage["completion_tokens"] - self._num_counted
            if chunk.get("choices"):
                self._num_counted = usage["completion_tokens"]
                is_content = is_content or num_new > 0
        if is_content:
            self._parts.append(text)
            self._arrivals.append(Arrival(now - self._sent_at, num_new))

    def exchange(self, now: float, status: int, outcome: Outcome, error: str) -> Exchange:
        """What came, when the stream has ended."""
        if outcome == "ok" and self._error:
            outcome, error = "error", self._error
        if outcome == "ok" and not (self._is_done or self._finish_reason):
            outcome, error = "error", "the stream ended in the middle of the answer"
        details = self._usage.get("prompt_tokens_details") or {}
        return Exchange(
            sent_at=self._sent_at,
            end_s=now - self._sent_at,
            outcome=outcome,
            status=status,
            error=error,
            arrivals=tuple(self._arrivals),
            text="".join(self._parts),
            finish_reason=self._finish_reason,
            num_prompt=self._usage.get("prompt_tokens") or 0,
            num_output=self._usage.get("completion_tokens") or 0,
            num_prefix_hit=details.get("cached_tokens") or 0,
            token_ids=tuple(self._token_ids) or None,
            stats=self._stats,
            usage=self._usage,
        )


def _stats(wire: Mapping[str, Any]) -> SpeculationStats | None:
    """Counts as our servers and vLLM's give them; None of others."""
    try:
        return SpeculationStats.from_wire(
            {"accepted_by_source": {}, "drafted_by_source": {}, **wire}
        )
    except (LookupError, TypeError, ValueError):
        return None
