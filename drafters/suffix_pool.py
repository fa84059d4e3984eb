"""SuffixPool: finished texts, each tenant's apart, bounded in bytes, the oldest out first."""

from __future__ import annotations

import hashlib
import os
import secrets
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from specdec.drafters.suffix_automaton import SuffixAutomaton, SuffixMatch
from specdec.errors import CheckpointError, UsageError

POOL_BYTES = 64 * 2**20  # about half a million tokens
FORMAT = "specdec suffix pool 1"
DIGEST_BYTES = 16
MEMORY = 64  # tokens of a text that are matched against an automaton it has not met before
CHUNK = 256  # tokens entered between two looks at the bound
TOKEN_BYTES = 5  # of a text kept as an array, with its room for growth


class _Generation:
    """Texts of one tenant that were entered, and are dropped, together."""

    def __init__(self, tenant: bytes) -> None:
        self.tenant = tenant
        self.automaton = SuffixAutomaton()
        self.token_ids = array("i")
        self.text_lens = array("i")

    @property
    def num_bytes(self) -> int:
        """Memory it takes, at most."""
        return self.automaton.num_bytes + TOKEN_BYTES * (len(self.token_ids) + len(self.text_lens))

    def begin(self) -> None:
        self.automaton.begin()
        self.text_lens.append(0)

    def extend(self, token_ids: Sequence[int]) -> None:
        self.automaton.extend(token_ids)
        self.token_ids.extend(token_ids)
        self.text_lens[-1] += len(token_ids)


class SuffixPool:
    """Finished texts by tenant, to be matched by requests of the same tenant and by no others.

    A tenant is a `cache_salt`, kept as a keyed hash; all requests without one are one tenant. A
    tenant has up to two generations of texts: a young one that grows, and an old one. Once the
    young one takes half of `max_bytes` it becomes the old one, and where all together take more
    than `max_bytes`, the generation that has gone longest without a new text is dropped. What a
    tenant asks never changes what another is guessed, but the space is shared.

    Texts are queued by `add` and entered by `enter`, so that no step waits for a long one.

    Example:
        pool = SuffixPool(vocab_size=49152)
        pool.add("salt", token_ids)
        pool.enter(len(token_ids))
        pool.match("salt").follow(other_ids)
    """

    def __init__(
        self, *, vocab_size: int, max_bytes: int = POOL_BYTES, key: bytes | None = None
    ) -> None:
        self.max_bytes = max_bytes
        self._vocab_size = vocab_size
        self._key = secrets.token_bytes(32) if key is None else key
        self._by_age: dict[int, _Generation] = {}  # by identity; the longest without a text first
        self._of_tenant: dict[bytes, tuple[_Generation, ...]] = {}  # young first
        self._waiting: deque[tuple[bytes, array[int]]] = deque()
        self._num_entered = 0  # tokens of the text that waits first
        self._num_bytes = 0  # of all generations

    @property
    def num_bytes(self) -> int:
        """Memory that all texts take, at most; no more than `max_bytes` after any call."""
        return self._num_bytes + sum(TOKEN_BYTES * len(ids) for _, ids in self._waiting)

    def tenant(self, cache_salt: str) -> bytes:
        """The name under which a salt's texts are kept: it does not show the salt."""
        return hashlib.blake2b(
            cache_salt.encode(), key=self._key, digest_size=DIGEST_BYTES
        ).digest()

    def match(self, cache_salt: str) -> PoolMatch:
        """What will follow a text of this tenant through the pool."""
        return PoolMatch(self, self.tenant(cache_salt))

    def generations(self, tenant: bytes) -> tuple[_Generation, ...]:
        """The tenant's, young first; the same object until one comes or goes."""
        return self._of_tenant.get(tenant, ())

    def add(self, cache_salt: str, token_ids: Sequence[int]) -> None:
        """Queue a finished text."""
        self._add(self.tenant(cache_salt), token_ids)

    def _add(self, tenant: bytes, token_ids: Sequence[int]) -> None:
        self._waiting.append((tenant, array("i", token_ids)))
        self._evict()

    def enter(self, num_tokens: int) -> None:
        """Enter at most `num_tokens` of the texts that wait, first come, first served."""
        while num_tokens > 0 and self._waiting:
            tenant, token_ids = self._waiting[0]
            start = self._num_entered
            chunk = token_ids[start : start + min(num_tokens, CHUNK)]
            young = self._young(tenant)
            before = young.num_bytes
            if start == 0 or not young.text_lens:
                young.begin()
            young.extend(chunk)
            self._num_bytes += young.num_bytes - before
            num_tokens -= len(chunk)
            self._num_entered += len(chunk)
            if self._num_entered == len(token_ids):
                self._waiting.popleft()
                self._num_entered = 0
            self._evict()

    def _young(self, tenant: bytes) -> _Generation:
        """The tenant's generation that grows, now the last to be dropped."""
        known = self.generations(tenant)
        if known and known[0].num_bytes < self.max_bytes // 2:
            young = known[0]
            del self._by_age[id(young)]
        else:
            for old in known[1:]:
                self._drop(old)
            young = _Generation(tenant)
            self._of_tenant[tenant] = (young, *known[:1])
            self._num_bytes += young.num_bytes
        self._by_age[id(young)] = young
        return young

    def _evict(self) -> None:
        while self._by_age and self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._by_age.values())))
        while self._waiting and self.num_bytes > self.max_bytes:
            self._waiting.popleft()
            self._num_entered = 0

    def _drop(self, generation: _Generation) -> None:
        del self._by_age[id(generation)]
        self._num_bytes -= generation.num_bytes
        tenant = generation.tenant
        rest = tuple(g for g in self._of_tenant[tenant] if g is not generation)
        if rest:
            self._of_tenant[tenant] = rest
        else:
            del self._of_tenant[tenant]

    @classmethod
    def open(cls, file: Path, *, vocab_size: int, max_bytes: int = POOL_BYTES) -> SuffixPool:
        """The pool saved in a file, or an empty one if there is none yet.

        Raises CheckpointError if the file is damaged or not a pool, UsageError if it is another
        vocabulary's or could not be written later.
        """
        if file.exists():
            return cls.load(file, vocab_size=vocab_size, max_bytes=max_bytes)
        if not os.access(file.parent, os.W_OK):
            raise UsageError(f"cannot keep a pool in {file}: {file.parent} is no writable folder")
        return cls(vocab_size=vocab_size, max_bytes=max_bytes)

    def save(self, file: Path) -> None:
        """Write all texts, those that wait too, in place of what the file held.

        safetensors: `token_ids` int32 [num_tokens], the texts one after another, oldest first;
        `text_lens` int32 [num_texts]; `tenant_idx` int32 [num_texts], into `tenants` uint8
        [num_tenants, 16]; metadata: format, vocab_size, and the key of the tenants' hashes. Only
        the file's owner may read it: it holds what was asked and answered. Raises UsageError.
        """
        texts = [
            (generation.tenant, text)
            for generation in self._by_age.values()
            for text in _split(generation)
        ] + list(self._waiting)
        names = {tenant: index for index, tenant in enumerate(dict(texts))}
        data = save(
            {
                "token_ids": np.array([t for _, ids in texts for t in ids], np.int32),
                "text_lens": np.array([len(ids) for _, ids in texts], np.int32),
                "tenant_idx": np.array([names[tenant] for tenant, _ in texts], np.int32),
                "tenants": np.frombuffer(b"".join(names), np.uint8).reshape(-1, DIGEST_BYTES),
            },
            {"format": FORMAT, "vocab_size": str(self._vocab_size), "key": self._key.hex()},
        )
        partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            partial.replace(file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UsageError(f"cannot write the pool {file}: {error.strerror}") from error

    @classmethod
    def load(cls, file: Path, *, vocab_size: int, max_bytes: int = POOL_BYTES) -> SuffixPool:
        """Read a saved pool and enter its texts, oldest first; 2 s for a million tokens.

        Raises CheckpointError if the file is damaged or no pool, UsageError if it was saved with
        another vocabulary: its token ids would mean something else.
        """
        try:
            with safe_open(file, framework="np") as stored:
                metadata = stored.metadata() or {}
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # safetensors' handle cannot be iterated
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} is damaged or no suffix pool ({error}); remove it or name another file"
            ) from error
        if metadata.get("format") != FORMAT:
            raise CheckpointError(f"{file} is not a suffix pool of this version; name another file")
        if metadata.get("vocab_size") != str(vocab_size):
            raise UsageError(
                f"{file} holds token ids of a vocabulary of {metadata.get('vocab_size')}, the model"
                f" has {vocab_size}; name another file"
            )
        try:
            key = bytes.fromhex(metadata["key"])
            texts = _texts(tensors, vocab_size)
            pool = cls(vocab_size=vocab_size, max_bytes=max_bytes, key=key)
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{file} is damaged ({error}); remove it or name another file"
            ) from error
        for tenant, token_ids in texts:
            pool._add(tenant, token_ids)
            pool.enter(len(token_ids))
        return pool


class PoolMatch:
    """A growing text's matches in its tenant's generations; texts that come later are seen too.

    Example: `match.follow([5, 7, 8])`, then `match.follow([5, 7, 8, 9])`.
    """

    def __init__(self, pool: SuffixPool, tenant: bytes) -> None:
        self._pool, self._tenant = pool, tenant
        self._generations: tuple[_Generation, ...] = ()
        self._matches: list[SuffixMatch] = []
        self._num_followed = 0

    def follow(self, token_ids: Sequence[int]) -> list[SuffixMatch]:
        """Go on to the text's end; the matches there, that of the young generation first.

        token_ids: the whole text; only what is new, and at most `MEMORY` tokens, are read.
        """
        generations = self._pool.generations(self._tenant)
        num_new = min(len(token_ids) - self._num_followed, MEMORY)
        if generations is not self._generations or num_new == MEMORY:
            self._generations = generations
            self._matches = [SuffixMatch(generation.automaton) for generation in generations]
            num_new = MEMORY
        new = token_ids[max(0, len(token_ids) - num_new) :]
        self._num_followed = len(token_ids)
        for match in self._matches:
            match.extend(new)
        return [match for match in self._matches if match.length]


def _split(generation: _Generation) -> list[array[int]]:
    """The texts of a generation."""
    texts, end = [], 0
    for length in generation.text_lens:
        start, end = end, end + length
        texts.append(generation.token_ids[start:end])
    return texts


def _texts(tensors: dict[str, npt.NDArray[Any]], vocab_size: int) -> list[tuple[bytes, array[int]]]:
    """(tenant, token ids) of each text. Raises KeyError or ValueError where tensors do not fit."""
    for name, dtype, num_dims in (
        ("token_ids", np.int32, 1),
        ("text_lens", np.int32, 1),
        ("tenant_idx", np.int32, 1),
        ("tenants", np.uint8, 2),
    ):
        if tensors[name].dtype != dtype or tensors[name].ndim != num_dims:
            raise ValueError(f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}")
    token_ids, text_lens = tensors["token_ids"], tensors["text_lens"]
    tenant_idx, tenants = tensors["tenant_idx"], tensors["tenants"]
    if tenants.shape[1] != DIGEST_BYTES:
        raise ValueError(f"tenants have {tenants.shape[1]} bytes")
    _check_range("token_ids", token_ids, vocab_size)
    _check_range("text_lens", text_lens, len(token_ids) + 1)
    _check_range("tenant_idx", tenant_idx, len(tenants))
    if text_lens.sum(dtype=np.int64) != len(token_ids) or len(tenant_idx) != len(text_lens):
        raise ValueError("its texts do not add up")
    ends = np.cumsum(text_lens, dtype=np.int64)
    return [
        (tenants[index].tobytes(), array("i", token_ids[end - length : end].tolist()))
        for index, length, end in zip(tenant_idx, text_lens, ends, strict=True)
    ]


def _check_range(name: str, values: npt.NDArray[Any], limit: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= limit):
        raise ValueError(f"{name} reaches from {values.min()} to {values.max()}")
