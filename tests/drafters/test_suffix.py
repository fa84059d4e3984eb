"""SuffixDrafter: its trees, long prompts, who is guessed what, and outputs that do not change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config import EngineConfig
from specdec.drafters.suffix import MAX_ENTERED, MIN_REACH, SuffixDrafter, grow
from specdec.drafters.suffix_automaton import SuffixAutomaton
from specdec.drafters.suffix_pool import SuffixPool
from specdec.drafting import DraftContext
from specdec.errors import UsageError
from specdec.limits import MAX_NODE_BUDGET
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import FinishReason, Phase, Request, TokenRecord
from specdec.tree import DraftTree
from tests.toy import ALPHABET, run_all, toy_engine, toy_model

VOCAB = 1000


def request(name: str, token_ids: Sequence[int], salt: str = "") -> Request:
    return Request(name, tuple(token_ids), SamplingParams(max_tokens=10**6), cache_salt=salt)


def admitted(drafter: SuffixDrafter, token_ids: Sequence[int], salt: str = "") -> Request:
    """A request of its own, known to the drafter."""
    req = request(f"r{len(drafter._texts)}", token_ids, salt)
    drafter.admit(req)
    return req


def draft(drafter: SuffixDrafter, req: Request, node_budget: int = 16) -> DraftTree:
    (tree,) = drafter.draft([DecodeStep(req, node_budget)])
    assert tree.token_ids[0] == req.token_ids[-1]
    assert tree.num_nodes <= 1 + node_budget
    return tree


def commit(req: Request, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        req.append(TokenRecord(token_id, ("target",), 1, 0), ())


def finish(drafter: SuffixDrafter, req: Request, reason: FinishReason = "stop") -> None:
    req.phase = Phase.RUNNING
    req.finish(reason)
    drafter.release(req)


def paths(tree: DraftTree) -> list[list[int]]:
    leaves = [n for n in range(tree.num_nodes) if not tree.children[n]]
    return [[tree.token_ids[n] for n in tree.path(leaf)[1:]] for leaf in leaves]


def reaches(tree: DraftTree) -> list[float]:
    reach = [1.0]
    for node in range(1, tree.num_nodes):
        reach.append(reach[tree.parents[node]] * tree.scores[node])
    return reach


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(0, 3), max_size=30),
    st.integers(0, 20),
)
def test_trees_are_well_formed(text: list[int], other: list[int], node_budget: int) -> None:
    pool = SuffixPool(vocab_size=VOCAB)
    pool.add("", other)
    pool.enter(len(other))
    drafter = SuffixDrafter(pool)
    tree = draft(drafter, admitted(drafter, text), node_budget)
    assert all(0 < score <= 1 for score in tree.scores)
    assert all(reach >= MIN_REACH * (1 - 1e-9) for reach in reaches(tree))
    assert set(tree.sources[1:]) <= {("suffix",)}
    for children in tree.children:
        assert len({tree.token_ids[child] for child in children}) == len(children)
    node, likeliest = 0, []
    while tree.children[node]:
        node = max(tree.children[node], key=tree.scores.__getitem__)
        likeliest.append(node)
    assert likeliest == list(range(1, len(likeliest) + 1))


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 12))
def test_a_smaller_budget_keeps_the_best_nodes(text: list[int], node_budget: int) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    matches = (automaton.repeated(),)
    few, many = grow(text[-1], node_budget, matches), grow(text[-1], 200, matches)
    best = sorted(reaches(many)[1:], reverse=True)[:node_budget]
    assert sorted(reaches(few)[1:], reverse=True) == pytest.approx(best)


def test_periodic_text_goes_on_past_its_end() -> None:
    for period in ([7], [7, 8], [7, 8, 9]):
        drafter = SuffixDrafter()
        tree = draft(drafter, admitted(drafter, period * 30))
        assert paths(tree)[0] == (period * 30)[:16]


def test_a_long_match_is_trusted_further_than_a_short_one() -> None:
    drafter = SuffixDrafter()
    text = list(range(100, 200))
    for matched in (1, 2, 4, 8, 16):
        tree = draft(drafter, admitted(drafter, [*text, 5, *text[:matched]]), 99)
        size = tree.num_nodes - 1
        assert paths(tree) == [text[matched : matched + size]]
        # A product of (n / (n + 2)) over lengths n from the match's on, down to `MIN_REACH`.
        ends = (matched + size) * (matched + size + 1)
        assert matched * (matched + 1) / ends >= MIN_REACH
        assert matched * (matched + 1) / (ends + 2 * (matched + size + 1)) < MIN_REACH


def test_branches_come_by_frequency() -> None:
    drafter = SuffixDrafter()
    text = [t for i, b in enumerate((50, 60, 50, 70, 50, 60)) for t in (1, 2, b, 900 + i)]
    tree = draft(drafter, admitted(drafter, [*text, 1, 2]))
    branches = sorted(tree.children[0], key=lambda node: -tree.scores[node])
    assert [tree.token_ids[node] for node in branches] == [50, 60, 70]


def test_shorter_matches_add_branches() -> None:
    drafter = SuffixDrafter()
    text = [9, 1, 2, 60, 3, 1, 2, 50, 8, 9, 1, 2]
    tree = draft(drafter, admitted(drafter, text))
    assert [tree.token_ids[node] for node in tree.children[0]] == [60, 50]


def test_nothing_matches_in_fresh_text() -> None:
    drafter = SuffixDrafter()
    for text in ([1], [1, 2, 3], [5, 5, 7]):
        assert draft(drafter, admitted(drafter, text)).num_nodes == 1


def test_budget_zero_drafts_the_root_and_loses_nothing() -> None:
    idle, busy = SuffixDrafter(), SuffixDrafter()
    text = [t * t % 7 for t in range(30)]
    one, two = admitted(idle, text), admitted(busy, text)
    for more in ([1, 4], [2], [4, 1, 0]):
        assert draft(idle, one, 0).num_nodes == 1
        draft(busy, two, 8)
        commit(one, more)
        commit(two, more)
    assert draft(idle, one, 8) == draft(busy, two, 8)


def test_preemption_changes_nothing() -> None:
    """Its tokens stay, and it is drafted for again when its blocks are back."""
    drafter = SuffixDrafter()
    req, same = admitted(drafter, [1, 2, 50, 1, 2]), admitted(drafter, [1, 2, 50, 1, 2])
    for each in (req, same):
        draft(drafter, each)
        commit(each, [50, 1])
    req.phase, req.num_computed, req.block_ids = Phase.WAITING, 0, []
    draft(drafter, same)
    req.phase = Phase.RUNNING
    assert draft(drafter, req) == draft(drafter, same)


def test_release_forgets_and_an_id_can_return() -> None:
    drafter = SuffixDrafter()
    first = admitted(drafter, [1, 2, 42, 1, 2])
    assert draft(drafter, first).num_nodes > 1
    drafter.release(first)
    drafter.release(first)  # as after an abort
    assert not drafter._texts
    again = admitted(drafter, [3, 1, 2])
    assert again.request_id == first.request_id
    assert draft(drafter, again).num_nodes == 1


def test_a_long_prompt_is_entered_over_several_drafts() -> None:
    """A stream would wait a quarter of a second for a neighbour's 100k tokens."""
    drafter = SuffixDrafter()
    text = [1, 2, 3, *(10 + i % 500 for i in range(2 * MAX_ENTERED)), 1, 2]
    long, short = admitted(drafter, text), admitted(drafter, [1, 2, 50, 1, 2])
    entered, sizes = [], []
    for _ in range(4):
        before = drafter.num_waiting(long)
        trees = drafter.draft([DecodeStep(long, 4), DecodeStep(short, 4)])
        entered.append(before - drafter.num_waiting(long))
        sizes.append([tree.num_nodes > 1 for tree in trees])
    assert entered == [MAX_ENTERED, MAX_ENTERED, len(text) - 2 * MAX_ENTERED, 0]
    assert sizes == [[False, True], [False, True], [True, True], [True, True]]


def test_nobody_falls_behind_for_ever() -> None:
    """Each step may commit a whole tree; that much is entered even where others use up the room."""
    drafter = SuffixDrafter()
    step_len = MAX_NODE_BUDGET + 1
    many = [admitted(drafter, [1, 2, 3]) for _ in range(MAX_ENTERED // step_len + 2)]
    for _ in range(3):
        for req in many:
            commit(req, [i % 7 for i in range(step_len - 3)])
        drafter.draft([DecodeStep(req, 4) for req in many])
    assert not any(drafter.num_waiting(req) for req in many)


def secret_of(prompt: Sequence[int]) -> list[int]:
    """What only its owner may be guessed."""
    return [900 + token_id for token_id in prompt]


any_prompt = st.lists(st.integers(0, 3), min_size=3, max_size=12)


@settings(deadline=None)
@given(st.lists(any_prompt, min_size=1, max_size=4), any_prompt)
def test_what_a_tenant_asks_is_guessed_for_no_other(
    theirs: list[list[int]], own: list[int]
) -> None:
    """Trees are the same whether or not others have been here, secrets after the same words too."""
    pools = [SuffixPool(vocab_size=VOCAB * 2) for _ in range(2)]
    for prompt in theirs:
        pools[0].add("them", [*own, *secret_of(prompt), *prompt, *secret_of(own)])
        pools[0].add("", [*own, *secret_of(prompt)])
    for pool in pools:
        pool.add("us", own)
        pool.enter(10_000)
    trees = []
    for pool in pools:
        drafter = SuffixDrafter(pool)
        req = admitted(drafter, own, "us")
        trees.append([draft(drafter, req)])
        commit(req, own[:2])
        trees[-1].append(draft(drafter, req))
    assert trees[0] == trees[1]
    assert all(token_id < 900 for tree in trees[0] for token_id in tree.token_ids)
    theirs_again = SuffixDrafter(pools[0])
    tree = draft(theirs_again, admitted(theirs_again, own, "them"))
    assert max(tree.token_ids) >= 900  # the pool does hold the secrets


def test_the_own_tenant_s_finished_texts_are_guessed() -> None:
    drafter = SuffixDrafter(SuffixPool(vocab_size=VOCAB))
    first = admitted(drafter, [1, 2, 3], "us")
    draft(drafter, first)
    commit(first, [50, 51, 52])
    finish(drafter, first)
    second = admitted(drafter, [9, 1, 2, 3], "us")
    draft(drafter, second)  # the text is entered with this draft
    assert paths(draft(drafter, second))[0] == [50, 51, 52]
    stranger = admitted(drafter, [9, 1, 2, 3], "them")
    assert draft(drafter, stranger).num_nodes == 1


def test_requests_without_a_salt_share_with_each_other_only() -> None:
    drafter = SuffixDrafter(SuffixPool(vocab_size=VOCAB))
    finish(drafter, admitted(drafter, [1, 2, 3, 50]))
    assert draft(drafter, admitted(drafter, [8])).num_nodes == 1
    assert draft(drafter, admitted(drafter, [1, 2, 3])).num_nodes == 2
    assert draft(drafter, admitted(drafter, [1, 2, 3], "salt")).num_nodes == 1


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_what_did_not_end_well_is_not_kept(reason: FinishReason | None) -> None:
    drafter = SuffixDrafter(pool := SuffixPool(vocab_size=VOCAB))
    req = admitted(drafter, [1, 2, 3, 50])
    if reason is None:  # disabled for this request, which goes on
        drafter.release(req)
    else:
        finish(drafter, req, reason)
    pool.enter(100)
    assert pool.generations(pool.tenant("")) == ()


def test_own_text_and_pool_are_merged() -> None:
    drafter = SuffixDrafter(pool := SuffixPool(vocab_size=VOCAB))
    pool.add("", [1, 2, 3, 60, 61])
    pool.enter(100)
    tree = draft(drafter, admitted(drafter, [1, 2, 3, 50, 51, 1, 2, 3]))
    assert paths(tree)[0][:2] == [50, 51]
    assert [60, 61] in paths(tree)
    pool.add("", [1, 2, 3, 50, 55])
    pool.enter(100)
    tree = draft(drafter, admitted(drafter, [1, 2, 3, 50, 51, 1, 2, 3]))
    (node,) = [n for n in tree.children[0] if tree.token_ids[n] == 50]
    assert {tree.token_ids[n] for n in tree.children[node]} == {51, 55}  # joined where they meet


def context(checkpoint: str | None) -> DraftContext:
    return DraftContext(toy_model(), EngineConfig(), checkpoint)


def test_a_pool_lives_in_the_file_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pool.safetensors"
    drafter = SuffixDrafter.load(context(str(file)))
    assert drafter.num_bytes > 0
    finish(drafter, admitted(drafter, [1, 2, 3, 5, 6], "us"))
    drafter.close()
    again = SuffixDrafter.load(context(str(file)))
    assert paths(draft(again, admitted(again, [1, 2, 3], "us"))) == [[5, 6]]
    assert draft(again, admitted(again, [1, 2, 3], "them")).num_nodes == 1


def test_without_a_file_there_is_no_pool() -> None:
    drafter = SuffixDrafter.load(context(None))
    assert drafter.num_bytes == 0
    finish(drafter, admitted(drafter, [1, 2, 3, 50], "us"))
    assert draft(drafter, admitted(drafter, [1, 2, 3], "us")).num_nodes == 1
    drafter.close()


def test_a_folder_that_is_missing_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no writable folder"):
        SuffixDrafter.load(context(str(tmp_path / "missing" / "pool.safetensors")))


@pytest.mark.parametrize("has_pool", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_word(has_pool: bool, temperature: float) -> None:
    """The toy target's outputs with drafts are those without, and drafts are accepted."""
    prompts = [(1, 2, 3) * 8, (5, 8, 2, 8) * 5, (1, 2, 3) * 8, (9,), tuple(range(20)) * 2]

    def requests() -> list[Request]:
        return [
            Request(
                f"r{index}",
                prompt,
                SamplingParams(
                    max_tokens=60, temperature=temperature, seed=index % 3, ignore_eos=True
                ),
                cache_salt="ab"[index % 2],
            )
            for index, prompt in enumerate(prompts * 2)
        ]

    plain = requests()
    run_all(toy_engine(), plain)
    pool = SuffixPool(vocab_size=len(ALPHABET), max_bytes=2**20) if has_pool else None
    engine = toy_engine(
        drafter=SuffixDrafter(pool), node_budget=20, token_budget=40, num_blocks=24, max_running=3
    )
    drafted = requests()
    run_all(engine, drafted)
    assert [r.output_ids for r in drafted] == [r.output_ids for r in plain]
    assert sum(r.stats.num_accepted for r in drafted) > 50
    assert not any(r.stats.disabled_drafters for r in drafted)
    assert pool is None or pool.num_bytes > 0
