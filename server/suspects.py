"""Suspects: requests that were running when the engine ended, and those that ended it twice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from specdec.errors import EngineStopped, InvalidRequest
from specdec.server.messages import Output, Submit

MAX_KNOWN = 4096  # digests of suspects and convicts; the one not met for longest is forgotten

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class Suspects:
    """Who may have ended the engine, known by a digest of what the engine was given.

    Requests that run at the engine's death become suspects. A suspect runs again only alone among
    suspects, so a second death convicts that one and never a neighbour that ran beside it; a
    suspect that the engine survives is cleared. What is submitted together is one request here.

    Example:
        suspects.admit(submits)    # raises what the client is told instead
        suspects.finish(output)    # the last output of each, as the engine sends it
        suspects.blame()           # the engine has ended
    """

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._running: dict[str, bytes] = {}  # digests by request id
        self._is_convicted: dict[bytes, bool] = {}  # of suspects, the one met last at the end

    def admit(self, submits: Sequence[Submit]) -> None:
        """Take note of what is about to run.

        Raises InvalidRequest for a request that ended the engine twice: its client shall not send
        it again, and clients do so after any status from 500 on. Raises EngineStopped for a
        suspect that has to wait for another.
        """
        digest = _digest(submits)
        if digest in self._is_convicted:
            self._meet(digest, is_convicted=self._is_convicted[digest])
            if self._is_convicted[digest]:
                raise InvalidRequest("this request ended the engine twice and is not run again")
            if self._suspects_running - {digest}:
                raise EngineStopped(
                    "this request ran when the engine ended, and so did one that runs now; "
                    "it can run after that one"
                )
        self._running.update((submit.request_id, digest) for submit in submits)

    def finish(self, output: Output) -> None:
        """The engine is through with a request: one that it computed to its end is cleared.

        Aborted and refused ones are not, for the engine may not have come to what ends it.
        """
        digest = self._running.pop(output.request_id, None)
        was_computed = output.finish_reason != "abort" and output.error_kind is None
        if digest is None or not was_computed or digest in self._running.values():
            return
        if self._is_convicted.get(digest) is False:
            del self._is_convicted[digest]

    def blame(self) -> None:
        """The engine has ended: what ran is suspect, and a suspect that ran is convicted."""
        convicts = self._suspects_running
        for digest in self._running.values():
            self._meet(digest, is_convicted=digest in convicts)
        self._running.clear()

    @property
    def _suspects_running(self) -> set[bytes]:
        return {digest for digest in self._running.values() if digest in self._is_convicted}

    def _meet(self, digest: bytes, *, is_convicted: bool) -> None:
        self._is_convicted.pop(digest, None)
        self._is_convicted[digest] = is_convicted
        if len(self._is_convicted) > self._max_known:
            del self._is_convicted[next(iter(self._is_convicted))]


def _digest(submits: Sequence[Submit]) -> bytes:
    """Of all that decides what is computed: not of ids, priorities and salts."""
    digest = hashlib.blake2b(digest_size=16)
    for submit in submits:
        biases = sorted(submit.params.logit_bias.items())  # the encoder orders text keys only
        params = replace(submit.params, logit_bias={})
        given = (submit.prompt_ids, params, biases, submit.speculation, submit.prediction_ids)
        digest.update(_encoder.encode(given))
    return digest.digest()
