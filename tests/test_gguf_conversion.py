"""GGUF conversion: the checkpoint holds what the file meant, and other files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from specdec.checkpoints import load_config
from specdec.errors import CheckpointError
from specdec.gguf_conversion import convert
from specdec.tokenizer import Tokenizer
from tests.tiny_gguf import HEAD_DIM, KV_HEADS, TEMPLATE, TOKENS, random_weights, write_gguf


class Told:
    """Stages that remember what they were told."""

    def __init__(self) -> None:
        self.totals: list[int | None] = []
        self.num_advanced = 0

    def start(self, text: str, total: int | None = None) -> None:
        self.totals.append(total)

    def advance(self) -> None:
        self.num_advanced += 1


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's checkpoint."""
    folder = tmp_path_factory.mktemp("converted")
    write_gguf(folder / "tiny.gguf", random_weights())
    told = Told()
    convert(folder / "tiny.gguf", folder, told)
    assert told.totals == [None, len(random_weights()), None]
    assert told.num_advanced == len(random_weights())
    return folder


def test_weights_and_config_are_exact(converted: Path) -> None:
    weights = load_file(converted / "model.safetensors")
    assert set(weights) == set(random_weights())
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, weight in random_weights().items():
        if weight.ndim == 2:
            weight = gguf.dequantize(gguf.quantize(weight, kind), kind)
        assert torch.equal(weights[name], torch.tensor(weight).bfloat16()), name
    config = load_config(converted)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert (config["head_dim"], config["num_key_value_heads"]) == (HEAD_DIM, KV_HEADS)
    assert config["max_position_embeddings"] == 128


def test_the_tokenizer_is_the_one_in_the_model_file(converted: Path) -> None:
    tokenizer = Tokenizer.load(converted)
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == len(TOKENS)

    def tokens(text: str) -> list[str]:
        return [TOKENS[i] for i in tokenizer.encode(text)]

    assert tokens("ab12") == ["ab", "1", "2"]  # digits stay single, whatever the merges say
    assert tokens("   1") == ["\u0120\u0120", "\u0120", "1"]
    assert tokens("a<|im_end|><think>") == ["a", "<|im_end|>", "<think>"]
    assert tokenizer.decode(tokenizer.encode("é<|im_end|><think>")) == "é<think>"
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x<|im_end|>"
    assert (converted / "chat_template.jinja").read_text() == TEMPLATE


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    """Left out, it would give another model's answers."""
    weights = random_weights()
    weights["model.layers.0.self_attn.q_norm.weight"] = weights["model.norm.weight"]
    write_gguf(tmp_path / "strange.gguf", weights)
    with pytest.raises(CheckpointError, match=r"has a tensor blk\.0\.self_attn\.q_norm\.weight"):
        convert(tmp_path / "strange.gguf", tmp_path, Told())


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "strange.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'mamba', expected 'llama'"):
        convert(tmp_path / "strange.gguf", tmp_path, Told())


@pytest.mark.parametrize(
    ("method", "replacement", "fault"),
    [
        ("add_tokenizer_pre", "llama-bpe", "tokenizer .'gpt2', 'llama-bpe'., expected"),
        ("add_token_list", None, r"has no tokenizer\.ggml\.tokens"),
    ],
)
def test_another_tokenizer_and_a_missing_field_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, replacement: Any, fault: str
) -> None:
    own = getattr(gguf.GGUFWriter, method)

    def write(writer: gguf.GGUFWriter, _: Any) -> None:
        if replacement is not None:
            own(writer, replacement)

    monkeypatch.setattr(gguf.GGUFWriter, method, write)
    write_gguf(tmp_path / "strange.gguf", random_weights())
    with pytest.raises(CheckpointError, match=fault):
        convert(tmp_path / "strange.gguf", tmp_path, Told())
