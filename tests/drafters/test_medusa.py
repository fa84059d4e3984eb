"""MedusaDrafter: trees of its heads' guesses, the states they read, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.drafters.medusa import NUM_CHILDREN, TREES, MedusaDrafter
from specdec.drafters.medusa_choices import PUBLISHED, Choice, best_choices, worths
from specdec.drafters.medusa_heads import WEIGHTS_FILE, MedusaHeads
from specdec.drafters.packed_heads import HeadGuesses, PackedHeads
from specdec.drafting import DraftContext
from specdec.errors import CheckpointError, UsageError
from specdec.loading import LoadedModel
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree
from specdec.verification import NO_VERDICT, Verdict
from tests.drafters.toy_drafters import EMBEDDING, toy_heads
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy
from tests.toy import ALPHABET, CONFIG, RandomTensors, run_all, toy_engine, toy_model

VOCAB, HIDDEN = len(ALPHABET), CONFIG["hidden_size"]
RANKS = [[0.5, 0.25, 0.1], [0.4, 0.2], [0.3, 0.1, 0.05], [0.2]]


def packed(num_heads: int = 4) -> PackedHeads:
    embedding = RandomTensors(CONFIG, 0).get(EMBEDDING)
    return PackedHeads(toy_heads(num_heads=num_heads), toy_model().model, embedding, embedding)


def request(name: str = "a", temperature: float = 0.0) -> Request:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=20, ignore_eos=True)
    return Request(name, (3, 1, 4, 1, 5), params)


def states(count: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(9))


def drafted(drafter: MedusaDrafter, node_budget: int, temperature: float = 0.0) -> DraftTree:
    """A tree after one observation."""
    req = request(temperature=temperature)
    drafter.admit(req)
    drafter.observe(req, NO_VERDICT, states())
    (tree,) = drafter.draft([DecodeStep(req, node_budget)])
    assert tree.token_ids[0] == 5 and tree.num_nodes <= node_budget + 1
    return tree


def guesses_of(heads: PackedHeads, temperature: float = 0.0) -> HeadGuesses:
    (found,) = heads.guess(states(), torch.tensor([5]), [request(temperature=temperature)])
    return found


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {
        tuple(tree.token_ids[n] for n in tree.path(node)[1:]): tree.scores[node]
        for node in range(1, tree.num_nodes)
    }


def tokens_of(choices: Sequence[Choice], guesses: HeadGuesses) -> dict[tuple[int, ...], Choice]:
    """The oracle: each choice's path of tokens, one rank after the other."""
    found = {}
    for choice in choices:
        path: tuple[int, ...] = ()
        for head, rank in enumerate(choice):
            parent = path[-1] if path else 5
            path = (*path, guesses.children(head, [parent], NUM_CHILDREN)[0].token_ids[rank])
        found[path] = choice
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("node_budget", [1, 7, 30, 200])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_tree_holds_the_list_cut_to_the_budget(
    name: str, node_budget: int, temperature: float
) -> None:
    heads = packed()
    tree = drafted(MedusaDrafter(heads, name, RANKS), node_budget, temperature)
    want = tokens_of(PUBLISHED[name][:node_budget], guesses_of(heads, temperature))
    assert paths(tree).keys() == want.keys()
    for path, score in paths(tree).items():
        own = RANKS[len(path) - 1]
        rank = want[path][-1]
        assert score == (own[rank] if rank < len(own) else 0.0)


@pytest.mark.parametrize("node_budget", [1, 5, 40])
def test_a_tree_by_ranks_holds_the_best_measured_choices(node_budget: int) -> None:
    heads = packed()
    tree = drafted(MedusaDrafter(heads, "ranks", RANKS), node_budget)
    want = tokens_of(best_choices(RANKS, node_budget), guesses_of(heads))
    assert {path: RANKS[len(path) - 1][c[-1]] for path, c in want.items()} == paths(tree)
    # Without a measurement some plausible decline is taken, and the budget is used.
    assert drafted(MedusaDrafter(heads, "ranks"), node_budget).num_nodes == node_budget + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("node_budget", [1, 6, 25])
def test_a_tree_by_probability_holds_the_worthiest_guesses(
    node_budget: int, temperature: float
) -> None:
    """Against all paths of the first two heads; a third is worth less than what it is below."""
    heads = packed(num_heads=2)
    guesses = guesses_of(heads, temperature)
    worths: dict[tuple[int, ...], float] = {}
    (first,) = guesses.children(0, [5], NUM_CHILDREN)
    for token_id, score in zip(first.token_ids, first.scores, strict=True):
        worths[token_id,] = score
        (below,) = guesses.children(1, [token_id], NUM_CHILDREN)
        for child, own in zip(below.token_ids, below.scores, strict=True):
            worths[token_id, child] = score * own
    best = sorted(worths, key=lambda path: -worths[path])[:node_budget]
    tree = drafted(MedusaDrafter(heads), node_budget, temperature)
    assert paths(tree).keys() == set(best) and tree.num_nodes == node_budget + 1


def test_the_first_step_has_no_state_and_the_last_row_is_kept() -> None:
    drafter = MedusaDrafter(packed())
    req, other = request(), request("b")
    for each in (req, other):
        drafter.admit(each)
    step = DecodeStep(req, 6)
    assert drafter.draft([step]) == [DraftTree.root_only(5)]
    rows = states(3)
    drafter.observe(req, NO_VERDICT, rows)
    (tree,) = drafter.draft([step])
    rows.zero_()  # the forward's buffer is used again
    assert drafter.draft([step]) == [tree] and tree.num_nodes == 7
    alone = MedusaDrafter(packed())
    alone.observe(req, NO_VERDICT, states(3)[2:])
    assert alone.draft([step]) == [tree]
    # Others beside it, one of them without a state or a budget, change nothing.
    none = DecodeStep(other, 6)
    assert drafter.draft([none, step]) == [DraftTree.root_only(5), tree]
    drafter.observe(other, NO_VERDICT, states(1))
    assert drafter.draft([step, none])[0] == tree
    assert drafter.draft([DecodeStep(req, 0)]) == [DraftTree.root_only(5)]
    drafter.observe(req, NO_VERDICT, None)  # a step without states leaves the one that is known
    assert drafter.draft([step]) == [tree]
    for _ in range(2):
        drafter.release(req)
    assert drafter.draft([step]) == [DraftTree.root_only(5)] and list(drafter._states) == ["b"]


class Recorder(MedusaDrafter):
    """Keeps its trees, and looks at which of the rows became its state."""

    def __init__(self) -> None:
        super().__init__(packed())
        self.trees: list[DraftTree] = []

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        self.trees += super().draft(steps)
        return self.trees[-len(steps) :]

    def observe(self, request: Request, verdict: Verdict, hidden: Tensor | None) -> None:
        super().observe(request, verdict, hidden)
        assert hidden is not None
        assert torch.equal(self._states[request.request_id], hidden[verdict.accepted_length])


@pytest.mark.usefixtures("backend")
def test_in_the_engine_it_drafts_from_the_second_step_on() -> None:
    drafter = Recorder()
    req = request()
    run_all(toy_engine(drafter=drafter, node_budget=8), [req])
    plain = request("plain")
    run_all(toy_engine(), [plain])
    assert req.output_ids == plain.output_ids and not req.stats.disabled_drafters
    assert [tree.num_nodes for tree in drafter.trees[:2]] == [1, 9]
    assert all(tree.num_nodes > 1 for tree in drafter.trees[1:-1])


# Loading. The target is a folder, for embedding and head are read from it.


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_or_skip(toy_config(write_toy(tmp_path_factory.mktemp("target")), "torch"))


def small_heads(hidden: int = 96, vocabulary: Sequence[int] | None = None) -> MedusaHeads:
    heads = MedusaHeads.blank(2, 1, hidden)
    if vocabulary is not None:
        heads.vocabulary = torch.tensor(vocabulary, dtype=torch.int32)
    return heads


def write(folder: Path, heads: MedusaHeads | None = None, **config: Any) -> Path:
    (heads or small_heads()).save(folder, config, torch.float32)
    return folder


def load(target: LoadedModel, checkpoint: object) -> MedusaDrafter:
    config = toy_config(Path(target.name), "torch")
    return MedusaDrafter.load(DraftContext(target, config, str(checkpoint)))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = dict(load_file(folder / WEIGHTS_FILE))
    edit(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / WEIGHTS_FILE)
    return folder


@pytest.mark.parametrize("tree", ["", *(f"@{name}" for name in TREES)])
def test_a_folder_is_loaded_with_any_tree(tree: str, target: LoadedModel, tmp_path: Path) -> None:
    folder = write(tmp_path, small_heads(vocabulary=range(0, 250, 5)), ranks=RANKS[:2])
    drafter = load(target, f"{folder}{tree}")
    req = request()
    drafter.observe(req, NO_VERDICT, torch.randn(1, 96))
    (drawn,) = drafter.draft([DecodeStep(req, 6)])
    assert drawn.num_nodes > 1 and {token % 5 for token in drawn.token_ids[1:]} == {0}
    assert drafter.num_bytes > 0 and drafter.worths == worths(RANKS[:2], 16)


def test_blank_heads_say_what_the_targets_projection_says(
    target: LoadedModel, tmp_path: Path
) -> None:
    drafter = load(target, write(tmp_path))
    state, req = torch.randn(1, 96, generator=torch.Generator().manual_seed(1)), request()
    drafter.observe(req, NO_VERDICT, state)
    (tree,) = drafter.draft([DecodeStep(req, 1)])
    head = load_file(Path(target.name) / "model.safetensors")["model.embed_tokens.weight"]
    assert tree.token_ids[1] == int((head @ state[0]).argmax())


def _set(name: str, *shape: int) -> Callable[[Path], Path]:
    return lambda folder: change(write(folder), lambda t: t.update({name: torch.zeros(shape)}))


def _truncated(folder: Path) -> Path:
    file = write(folder) / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def _pickled(folder: Path) -> Path:
    write(folder)
    (folder / WEIGHTS_FILE).rename(folder / "medusa_lm_head.pt")
    return folder


def _config(**fields: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        config = json.loads((write(folder) / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    return make


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "hidden size": (
        lambda folder: write(folder, small_heads(48)),
        r"medusa_lm_head.safetensors: tensor 0.0.linear.weight has shape \[48, 48\],"
        r" expected \[96, 96\]",
    ),
    "missing": (
        lambda folder: change(write(folder), lambda tensors: void(tensors.pop("1.0.linear.bias"))),
        "has no tensor 1.0.linear.bias",
    ),
    "half of the roots": (
        lambda folder: change(write(folder), lambda tensors: void(tensors.pop("0.root.weight"))),
        "has no tensor 0.root.weight",
    ),
    "layer": (
        _set("1.0.linear.weight", 96, 48),
        r"medusa_lm_head.safetensors: tensor 1.0.linear.weight has shape \[96, 48\],"
        r" expected \[96, 96\]",
    ),
    "bias": (_set("0.0.linear.bias", 48), r"0.0.linear.bias has shape \[48\], expected \[96\]"),
    "root": (_set("1.root.weight", 96, 48), r"1.root.weight has shape \[96, 48\], expected \[96"),
    "parent": (_set("1.parent.weight", 8, 96), r"1.parent.weight has shape \[8, 96\], expected"),
    "projection": (
        lambda folder: change(
            write(folder),
            lambda t: t.update({f"{i}.1.weight": torch.zeros(257 - i, 96) for i in (0, 1)}),
        ),
        r"1.1.weight has shape \[256, 96\], expected \[257, 96\]",
    ),
    "too many rows": (
        lambda folder: change(
            write(folder),
            lambda t: t.update({f"{i}.1.weight": torch.zeros(300, 96) for i in (0, 1)}),
        ),
        "know 300 tokens, the target 257",
    ),
    "rows and vocabulary": (
        lambda folder: change(
            write(folder, small_heads(vocabulary=[1, 2, 3])),
            lambda t: t.update({f"{i}.1.weight": torch.zeros(4, 96) for i in (0, 1)}),
        ),
        r"0.1.weight has shape \[4, 96\], expected \[3, 96\]",
    ),
    "tokens out of range": (
        lambda folder: write(folder, small_heads(vocabulary=[1, 257])),
        "tensor vocabulary must hold ascending token ids below 257",
    ),
    "no tokens": (
        lambda folder: write(folder, small_heads(vocabulary=[])),
        "tensor vocabulary must hold ascending token ids below 257",
    ),
    "tokens twice": (
        lambda folder: write(folder, small_heads(vocabulary=[7, 7])),
        "medusa_lm_head.safetensors: tensor vocabulary is not ascending",
    ),
    "tokens in a matrix": (_set("vocabulary", 2, 2), "tensor vocabulary is not ascending"),
    "truncated": (_truncated, "medusa_lm_head.safetensors is truncated or damaged"),
    "pickled": (_pickled, "has only medusa_lm_head.pt: such files can execute code on load"),
    "no heads": (_config(medusa_num_heads=None), "config.json is not of Medusa heads"),
    "too many heads": (_config(medusa_num_heads=1000), "1000 heads of 1 layers; supported are"),
    "ranks": (_config(ranks=[["many"], [0.5]]), "config.json: ranks must be lists of numbers"),
    "no ranks": (_config(ranks=7), "config.json: ranks must be lists of numbers"),
    "ranks of one head": (_config(ranks=[[0.5]]), "config.json: ranks of 1 heads, expected 2"),
}


def void(_: object) -> None:
    """Of an expression that is made for its effect."""


@pytest.mark.parametrize("name", BROKEN)
def test_broken_heads_are_refused_by_name(name: str, target: LoadedModel, tmp_path: Path) -> None:
    make, says = BROKEN[name]
    folder = make(tmp_path)
    with pytest.raises(CheckpointError, match=says) as caught:
        load(target, folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_tree_is_refused_before_anything_is_read(target: LoadedModel) -> None:
    with pytest.raises(UsageError, match=r"unknown tree 'bush' of medusa; .*probability, ranks,"):
        load(target, "nowhere@bush")
    with pytest.raises(UsageError, match="no medusa drafter comes with"):
        load(target, "@ranks")
    with pytest.raises(CheckpointError, match="no model 'nowhere'"):
        load(target, "nowhere@ranks")
