"""DraftModel: small models from checkpoints, whole or sharing the target's embedding; refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.config import Backend, EngineConfig
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.null import NullDrafter
from specdec.drafters.small_model import SmallModelDrafter
from specdec.drafting import DraftContext
from specdec.engine import Engine
from specdec.errors import CheckpointError, UsageError
from specdec.loading import LoadedModel
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy
from tests.toy import run_all

VOCAB, HIDDEN = 257, 96  # of the toy folder
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPT = tuple(b"abcabcabd" * 3)
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module", params=["torch", "native"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    backend: Backend = request.param
    return load_or_skip(toy_config(write_toy(tmp_path_factory.mktemp("target")), backend))


@pytest.fixture(scope="module")
def config(target: LoadedModel) -> EngineConfig:
    is_native = type(target.model).__name__ == "NativeModel"
    return toy_config(Path(target.name), "native" if is_native else "torch")


def write(
    target: LoadedModel,
    folder: Path,
    edit: Callable[[Tensors], object] = lambda tensors: None,
    **fields: Any,
) -> Path:
    """A copy of the target's checkpoint with other tensors and other fields of config.json."""
    shutil.copytree(target.name, folder, dirs_exist_ok=True)
    tensors = dict(load_file(folder / "model.safetensors"))
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | fields))
    return folder


def sharing(
    target: LoadedModel, folder: Path, vocabulary: Sequence[int] | None = None, **fields: Any
) -> Path:
    """The target's layers without its embedding and tokenizer."""

    def edit(tensors: Tensors) -> None:
        del tensors[EMBEDDING]
        if vocabulary is not None:
            tensors["vocabulary"] = torch.tensor(vocabulary, dtype=torch.int32)

    write(target, folder, edit, shares_embeddings_with=target.name, **fields)
    (folder / "tokenizer.json").unlink()
    return folder


def drafter_of(target: LoadedModel, config: EngineConfig, folder: Path) -> SmallModelDrafter:
    return SmallModelDrafter.load(DraftContext(target, config, str(folder)))


def first_guesses(drafter: SmallModelDrafter, node_budget: int = 8) -> list[int]:
    """Guesses of the token after the prompt, best first."""
    request = Request("a", PROMPT, SamplingParams())
    drafter.admit(request)
    (tree,) = drafter.draft([DecodeStep(request, node_budget)])
    drafter.release(request)
    return [tree.token_ids[child] for child in tree.children[0]]


def accepted(target: LoadedModel, config: EngineConfig, folder: Path) -> float:
    """Acceptance rate of one node per step, greedy and sampled; the tokens must not change."""
    rates = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=13, ignore_eos=True, temperature=temperature, seed=4)
        plain, drafted = (Request(name, PROMPT, params) for name in ("plain", "drafted"))
        run_all(Engine(config, loaded=target, drafter=NullDrafter()), [plain])
        drafter = drafter_of(target, config, folder)
        narrow = dataclasses.replace(config, node_budget=1)
        run_all(Engine(narrow, loaded=target, drafter=drafter), [drafted])
        assert drafted.output_ids == plain.output_ids and not drafted.stats.disabled_drafters
        rates.append(drafted.stats.acceptance_rate)
    return min(rates)


@pytest.mark.parametrize("form", ["whole", "sharing", "padded", "untied"])
def test_a_checkpoint_that_equals_the_target_is_always_right(
    form: str, target: LoadedModel, config: EngineConfig, tmp_path: Path
) -> None:
    def pad(tensors: Tensors) -> None:
        rows = 3 * torch.ones(43, HIDDEN)  # likely tokens, if they were ever looked at
        tensors[EMBEDDING] = torch.cat((tensors[EMBEDDING], rows))

    def untie(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()

    make = {
        "whole": lambda: write(target, tmp_path),
        "sharing": lambda: sharing(target, tmp_path),
        "padded": lambda: write(target, tmp_path, pad, vocab_size=300),
        "untied": lambda: write(target, tmp_path, untie, tie_word_embeddings=False),
    }
    assert accepted(target, config, make[form]()) == 1.0


def test_a_vocabulary_limits_the_guesses_and_ranks_them_as_the_target_does(
    target: LoadedModel, config: EngineConfig, tmp_path: Path
) -> None:
    likeliest, *_ = first_guesses(drafter_of(target, config, sharing(target, tmp_path / "all")))
    words = [token_id for token_id in range(1, VOCAB, 2) if token_id != likeliest]
    limited = first_guesses(drafter_of(target, config, sharing(target, tmp_path / "few", words)))
    assert set(limited) <= set(words)
    # The request, greedy, may only choose these.
    params = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=frozenset(words))
    request = Request("a", PROMPT, params)
    run_all(Engine(config, loaded=target, drafter=NullDrafter()), [request])
    assert request.output_ids == limited[:1]


def test_tokens_that_the_draft_model_does_not_know_are_no_error(
    target: LoadedModel, config: EngineConfig, tmp_path: Path
) -> None:
    """As where the target's embedding is padded further than the draft model's."""

    def cut(tensors: Tensors) -> None:
        tensors[EMBEDDING] = tensors[EMBEDDING][:200].clone()

    drafter = drafter_of(target, config, write(target, tmp_path, cut, vocab_size=200))
    request = Request("a", (*PROMPT, VOCAB - 1, 5, 200), SamplingParams())
    drafter.admit(request)
    (tree,) = drafter.draft([DecodeStep(request, 8)])
    assert tree.num_nodes == 9 and max(tree.token_ids[1:]) < 200


def test_its_cache_leaves_the_target_as_many_blocks(
    target: LoadedModel, config: EngineConfig, tmp_path: Path
) -> None:
    """A draft model as large as the target halves the memory, but for its weights."""
    drafter = drafter_of(target, config, write(target, tmp_path))
    per_block = target.model.kv_bytes_per_block(config.kv, config.block_size)
    assert drafter.pool.num_blocks == config.kv_memory_mib * 2**20 // (2 * per_block)
    engine = Engine(config, loaded=target, drafter=drafter)
    num_weights = -(-target.model.weight_bytes // per_block)
    assert drafter.pool.num_blocks - num_weights <= engine.pool.num_blocks
    assert engine.pool.num_blocks <= drafter.pool.num_blocks


def test_another_tokenizer_is_refused_with_the_first_difference(
    target: LoadedModel, config: EngineConfig, tmp_path: Path
) -> None:
    write(target, tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    first, second = (token for token, index in vocab.items() if index in (40, 90))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(UsageError, match=r"has another tokenizer than .*: token 40 is") as caught:
        DraftModel.load(tmp_path, target, config)
    here, there = sorted((first, second), key=vocab.__getitem__)
    assert f"token 40 is {here!r} there and {there!r} in the target" in str(caught.value)


LAYER = "model.layers.1"


def _zeros(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.pop(f"{LAYER}.mlp.up_proj.weight"), "has no tensor .*1.mlp.up_proj.weight"),
        (lambda t: t.pop("model.norm.weight"), "has no tensor model.norm.weight"),
        (lambda t: t.pop(EMBEDDING), f"has no tensor {EMBEDDING}"),
        (
            _zeros(f"{LAYER}.self_attn.q_proj.weight", 95, 96),
            r"tensor model.layers.1.self_attn.q_proj.weight has shape \[95, 96\],"
            r" expected \[96, 96\]",
        ),
        (_zeros(f"{LAYER}.mlp.down_proj.weight", 96, 47), r"shape \[96, 47\], expected \[96, 48\]"),
        (_zeros(EMBEDDING, 256, 96), r"shape \[256, 96\], expected \[257, 96\]"),
        (_zeros("model.layers.0.input_layernorm.weight", 95), r"shape \[95\], expected \[96\]"),
    ],
)
def test_tensors_that_are_missing_or_of_another_shape_are_named(
    edit: Callable[[Tensors], object],
    says: str,
    target: LoadedModel,
    config: EngineConfig,
    tmp_path: Path,
) -> None:
    folder = write(target, tmp_path, edit)
    with pytest.raises(CheckpointError, match=says) as caught:
        DraftModel.load(folder, target, config)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_head_of_another_shape_is_named(
    target: LoadedModel, config: EngineConfig, tmp_path: Path
) -> None:
    folder = write(target, tmp_path, _zeros(HEAD, 200, 96), tie_word_embeddings=False)
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight has shape \[200, 96\], expected \[257, 96\]"
    ):
        DraftModel.load(folder, target, config)


def test_a_truncated_file_is_named(
    target: LoadedModel, config: EngineConfig, tmp_path: Path
) -> None:
    file = sharing(target, tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
        DraftModel.load(tmp_path, target, config)


@pytest.mark.parametrize("vocabulary", [[3, 2], [5, 5], [0, VOCAB], [-1, 4], []])
def test_a_vocabulary_must_be_ascending_tokens_of_the_target(
    vocabulary: list[int], target: LoadedModel, config: EngineConfig, tmp_path: Path
) -> None:
    folder = sharing(target, tmp_path, vocabulary)
    with pytest.raises(
        CheckpointError, match=f"vocabulary must hold ascending token ids below {VOCAB}"
    ):
        DraftModel.load(folder, target, config)


@pytest.mark.parametrize("fields", [{"hidden_size": 64}, {"vocab_size": 300}])
def test_layers_for_another_embedding_are_refused_with_both_shapes(
    fields: dict[str, Any], target: LoadedModel, config: EngineConfig, tmp_path: Path
) -> None:
    folder = sharing(target, tmp_path, **fields)
    shape = {"vocab_size": VOCAB, "hidden_size": HIDDEN} | fields
    with pytest.raises(CheckpointError) as caught:
        DraftModel.load(folder, target, config)
    assert f"[{shape['vocab_size']}, {shape['hidden_size']}]" in str(caught.value)
    assert f"is [{VOCAB}, {HIDDEN}]" in str(caught.value)


def test_without_a_name_the_error_says_how_to_get_one(
    target: LoadedModel, config: EngineConfig
) -> None:
    with pytest.raises(UsageError, match=r"no small-model drafter comes with .*=FOLDER"):
        SmallModelDrafter.load(DraftContext(target, config))
