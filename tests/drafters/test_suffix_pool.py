"""SuffixPool: bound, age, generations, and files that are whole, damaged or someone else's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from specdec.drafters.suffix_automaton import NONE, ROOT
from specdec.drafters.suffix_pool import FORMAT, MEMORY, PoolMatch, SuffixPool
from specdec.errors import CheckpointError, UsageError

VOCAB = 100_000


def pool_of(texts: dict[str, list[list[int]]], max_bytes: int = 2**20) -> SuffixPool:
    """A pool in which all texts are entered, in this order."""
    pool = SuffixPool(vocab_size=VOCAB, max_bytes=max_bytes)
    for salt, own in texts.items():
        for text in own:
            pool.add(salt, text)
            pool.enter(len(text))
    return pool


def longest(pool: SuffixPool, salt: str, text: list[int]) -> int:
    """How many of the text's last tokens the tenant's pool knows in one place."""
    return max((match.length for match in pool.match(salt).follow(text)), default=0)


def check(pool: SuffixPool) -> None:
    """The books balance and the bound holds."""
    generations = list(pool._by_age.values())
    assert pool._num_bytes == sum(each.num_bytes for each in generations)
    assert pool.num_bytes <= pool.max_bytes
    of_tenants = [each for own in pool._of_tenant.values() for each in own]
    assert {id(each) for each in of_tenants} == set(pool._by_age)
    assert all(1 <= len(own) <= 2 for own in pool._of_tenant.values())
    assert all(sum(each.text_lens) == len(each.token_ids) for each in generations)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(0, 3000), st.integers(1, 500), st.integers(0, 2000)
        ),
        max_size=12,
    ),
    st.sampled_from([1_000, 60_000, 400_000]),
)
def test_bound_holds_after_every_call(
    texts: list[tuple[str, int, int, int]], max_bytes: int
) -> None:
    pool = SuffixPool(vocab_size=VOCAB, max_bytes=max_bytes)
    for salt, size, num_symbols, num_entered in texts:
        pool.add(salt, [i * i % num_symbols for i in range(size)])
        check(pool)
        pool.enter(num_entered)
        check(pool)


def unique_text(name: int, size: int = 200) -> list[int]:
    return [name * 1000 + i for i in range(size)]


def test_the_tenant_that_was_quiet_longest_goes_first() -> None:
    one = pool_of({"a": [unique_text(1)]}).num_bytes
    pool = pool_of({salt: [unique_text(i)] for i, salt in enumerate("abc")}, int(3.5 * one))
    pool.add("a", unique_text(0)[:5])  # a is heard of again
    pool.enter(5)
    pool.add("d", unique_text(3))
    pool.enter(200)
    known = {salt: longest(pool, salt, unique_text(i)) for i, salt in enumerate("abcd")}
    assert known == {"a": MEMORY, "b": 0, "c": MEMORY, "d": MEMORY}


def test_a_tenant_s_old_texts_go_before_its_new_ones() -> None:
    one = pool_of({"a": [unique_text(1)]}).num_bytes
    pool = pool_of({"a": [unique_text(i) for i in range(12)]}, 6 * one)
    known = [longest(pool, "a", unique_text(i)) > 0 for i in range(12)]
    assert known == sorted(known)  # forgotten first, then known
    assert 3 <= sum(known) <= 6  # half of the space at least


def test_a_text_larger_than_the_pool_leaves_its_end() -> None:
    pool = pool_of({"a": [unique_text(1, 900)]}, 60_000)
    check(pool)
    assert longest(pool, "a", unique_text(1, 900)) == MEMORY
    assert longest(pool, "a", unique_text(1, 100)) == 0


def test_texts_are_entered_bit_by_bit() -> None:
    pool = SuffixPool(vocab_size=VOCAB)
    pool.add("a", unique_text(1))
    pool.add("a", unique_text(2))
    sizes = []
    while pool._waiting:
        pool.enter(90)
        sizes.append(sum(len(each.token_ids) for each in pool.generations(pool.tenant("a"))))
    assert sizes == [90, 180, 270, 360, 400]
    assert list(pool.generations(pool.tenant("a"))[0].text_lens) == [200, 200]


def is_sound(match: PoolMatch, text: list[int]) -> bool:
    """Whether each match is where its automaton has the text's last tokens."""
    for each in match.follow(text):
        each.settle()
        state = ROOT
        for token_id in text[len(text) - each.length :]:
            state = each.automaton.step(state, token_id)
            assert state != NONE
        if state != each.state:
            return False
    return True


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=100), st.integers(1, 9)), max_size=20),
    st.lists(st.integers(0, 3), min_size=1, max_size=250),
)
def test_matches_stay_sound_while_generations_come_and_go(
    texts: list[tuple[list[int], int]], text: list[int]
) -> None:
    pool = SuffixPool(vocab_size=VOCAB, max_bytes=20_000)
    match, end = pool.match("a"), 1
    for more, num_new in texts:
        pool.add("a", more)
        pool.enter(70)
        assert is_sound(match, text[:end])
        end = min(len(text), end + num_new)
    fresh, kept = pool.match("a").follow(text), match.follow(text)
    lengths = {id(each.automaton): each.length for each in fresh}
    assert all(each.length >= min(1, lengths.get(id(each.automaton), 1)) for each in kept)
    assert is_sound(match, text)


def test_a_new_generation_is_matched_with_the_text_so_far() -> None:
    pool = pool_of({"a": [unique_text(2)]}, 200_000)
    match, text = pool.match("a"), unique_text(1)
    assert match.follow(text) == []
    first = pool.generations(pool.tenant("a"))
    for name in range(3, 20):
        pool.add("a", unique_text(name))
        pool.enter(200)
        if pool.generations(pool.tenant("a")) is not first:
            break
    pool.add("a", text)
    pool.enter(200)
    assert [each.length for each in match.follow(text)] == [MEMORY]


def test_tokens_that_were_skipped_end_a_match() -> None:
    """Of many new tokens only the last are read; what matched before them does not go on."""
    tail = list(range(100, 100 + MEMORY))
    pool = pool_of({"a": [[1, 2, 3, *tail]]})
    match = pool.match("a")
    assert [each.length for each in match.follow([1, 2, 3])] == [3]
    assert [each.length for each in match.follow([1, 2, 3, 7, *tail])] == [MEMORY]


def saved(tmp_path: Path) -> tuple[SuffixPool, Path]:
    pool = pool_of({"secret salt": [[1, 2, 3, 4], [5, 6]], "": [[1, 2, 9]]})
    pool.add("late", [7, 8])  # still waits
    pool.save(tmp_path / "pool.safetensors")
    return pool, tmp_path / "pool.safetensors"


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    pool, file = saved(tmp_path)
    loaded = SuffixPool.open(file, vocab_size=VOCAB)
    assert list(map(loaded.tenant, ("secret salt", ""))) == list(
        map(pool.tenant, ("secret salt", ""))
    )
    pool.enter(100)
    ages = [
        [(each.tenant, each.token_ids, each.text_lens) for each in both._by_age.values()]
        for both in (pool, loaded)
    ]
    assert ages[0] == ages[1]
    assert longest(loaded, "secret salt", [1, 2, 3]) == 3
    assert longest(loaded, "", [1, 2, 3]) == 0
    assert longest(loaded, "late", [7, 8]) == 2
    assert list(tmp_path.iterdir()) == [file]
    loaded.save(file)  # over the old one
    assert longest(SuffixPool.load(file, vocab_size=VOCAB), "late", [7, 8]) == 2


def test_an_empty_pool_is_saved_too(tmp_path: Path) -> None:
    SuffixPool(vocab_size=VOCAB).save(tmp_path / "pool")
    assert SuffixPool.load(tmp_path / "pool", vocab_size=VOCAB).num_bytes == 0


def test_order_of_age_outlives_the_file(tmp_path: Path) -> None:
    one = pool_of({"a": [unique_text(1)]}).num_bytes
    pool = pool_of({salt: [unique_text(i)] for i, salt in enumerate("abc")}, int(3.5 * one))
    pool.add("a", [5])
    pool.enter(1)
    pool.save(tmp_path / "pool")
    again = SuffixPool.load(tmp_path / "pool", vocab_size=VOCAB, max_bytes=pool.max_bytes)
    again.add("d", unique_text(3))
    again.enter(200)
    known = {salt: longest(again, salt, unique_text(i)) for i, salt in enumerate("abcd")}
    assert known == {"a": MEMORY, "b": 0, "c": MEMORY, "d": MEMORY}


def test_the_file_shows_no_salt_and_is_its_owner_s_alone(tmp_path: Path) -> None:
    _, file = saved(tmp_path)
    assert b"secret" not in file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600


def test_salts_are_hashed_with_a_key_of_each_pool_s_own() -> None:
    pools = [SuffixPool(vocab_size=VOCAB) for _ in range(2)]
    assert pools[0].tenant("salt") != pools[1].tenant("salt")


@settings(deadline=None)
@given(st.data())
def test_a_damaged_file_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut, or with one byte changed: refused, or still a whole pool; nothing else is raised."""
    _, file = saved(tmp_path_factory.mktemp("pool"))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    message = ""
    try:
        check(SuffixPool.open(file, vocab_size=VOCAB))
    except (CheckpointError, UsageError) as error:
        message = str(error)
    if message:
        assert str(file) in message
        assert "another file" in message
        assert "\n" not in message


Tensors = dict[str, npt.NDArray[Any]]


def change(name: str, value: object, dtype: type = np.int32) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = np.array(value, dtype)

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        change("token_ids", [1, 2, 3, 4, 5, 6, 1, 2, VOCAB, 7, 8]),
        change("token_ids", [1, 2, 3, 4, 5, 6, 1, 2, -1, 7, 8]),
        change("token_ids", [1, 2, 3]),
        change("token_ids", [[1, 2, 3, 4, 5, 6, 1, 2, 9, 7, 8]]),
        change("token_ids", [1, 2, 3, 4, 5, 6, 1, 2, 9, 7, 8], np.float32),
        change("text_lens", [4, 2, 3, 3]),
        change("text_lens", [-4, 10, 3, 2]),
        change("text_lens", [4, 2, 5]),
        change("tenant_idx", [0, 0, 1, 3]),
        change("tenant_idx", [0, 0, 1, -1]),
        change("tenants", [1, 2, 3], np.uint8),
        change("tenants", [[1, 2], [3, 4], [5, 6]], np.uint8),
        lambda tensors: tensors.pop("tenant_idx"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, damage: Callable[[Tensors], None]
) -> None:
    _, file = saved(tmp_path)
    with safe_open(file, framework="np") as stored:
        metadata = stored.metadata()
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # safetensors' handle cannot be iterated
    save_file(tensors, file, metadata)
    SuffixPool.load(file, vocab_size=VOCAB)  # untouched, it is read
    damage(tensors)
    save_file(tensors, file, metadata)
    with pytest.raises(CheckpointError, match=r"is damaged \(.*\); remove it or name another file"):
        SuffixPool.load(file, vocab_size=VOCAB)


def test_other_files_are_refused(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    save_file({"x": np.zeros(3, np.float32)}, weights)
    with pytest.raises(CheckpointError, match="not a suffix pool of this version"):
        SuffixPool.open(weights, vocab_size=VOCAB)
    save_file({"x": np.zeros(3, np.float32)}, weights, {"format": FORMAT, "vocab_size": str(VOCAB)})
    with pytest.raises(CheckpointError, match="is damaged"):
        SuffixPool.open(weights, vocab_size=VOCAB)
    for other in (tmp_path, tmp_path / "text"):
        if not other.exists():
            other.write_text("hello")
        with pytest.raises(CheckpointError, match="damaged or no suffix pool"):
            SuffixPool.open(other, vocab_size=VOCAB)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    _, file = saved(tmp_path)
    with pytest.raises(
        UsageError, match=r"vocabulary of 100000, the model has 32000; name another"
    ):
        SuffixPool.open(file, vocab_size=32_000)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, file = saved(tmp_path)
    before = file.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UsageError, match=r"cannot write the pool .*: No space left on device"):
        pool.save(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
