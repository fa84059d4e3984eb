"""Dispatch: triton stays out of processes that do not use it, and what cannot run is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from specdec.config import EngineConfig, KVPrecision
from specdec.errors import UsageError
from specdec.kernels import dispatch
from specdec.kernels.attention_group import ROW_TILE
from specdec.kv_cache import KVCache
from specdec.loading import _device, _row_tile, load_model, make_kv_cache
from specdec.row_invariance import PINNED_ROWS
from tests.toy import toy_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

_ROOT = Path(__file__).parents[2]
_WITHOUT_TRITON = """
import sys
sys.path.append(sys.argv[1])
from tests.toy import run_all, toy_engine
from specdec.params import SamplingParams
from specdec.request import Request
import specdec.cli, specdec.info
request = Request("a", (1, 2, 1, 2), SamplingParams(max_tokens=4))
run_all(toy_engine(drafter_name="ngram"), [request])
specdec.info.collect()
found = sorted(name for name in sys.modules if name.split(".")[0] == "triton")
assert not found, found
"""


def test_a_cpu_never_imports_triton() -> None:
    command = [sys.executable, "-c", _WITHOUT_TRITON, str(_ROOT)]
    subprocess.run(command, check=True, timeout=120)


def test_a_cpu_has_no_objections() -> None:
    assert dispatch.objection(CPU, head_dim=72, block_size=16) is None


def gpu(capability: tuple[int, int], hip: str | None = None) -> SimpleNamespace:
    """Stands for `torch` on a machine with such a GPU."""
    return SimpleNamespace(
        version=SimpleNamespace(hip=hip),
        cuda=SimpleNamespace(
            get_device_capability=lambda device: capability,
            get_device_name=lambda device: "Some GPU",
        ),
    )


@pytest.mark.parametrize(
    ("capability", "head_dim", "block_size", "words"),
    [
        ((9, 0), 128, 32, None),
        ((8, 0), 64, 16, None),
        ((12, 0), 256, 48, None),
        ((9, 0), 72, 32, "heads of 16, 32, 64, 80, 96, 128, 256, not 72"),
        ((9, 0), 128, 24, "multiples of 16, not 24"),
        ((7, 5), 128, 32, "Some GPU has compute capability 7.5, the kernels need 8.0"),
    ],
)
def test_what_a_gpu_cannot_run_is_said(
    capability: tuple[int, int], head_dim: int, block_size: int, words: str | None
) -> None:
    with patch.object(dispatch, "torch", gpu(capability)):
        said = dispatch.objection(CUDA, head_dim, block_size)
    assert (said is None) if words is None else (said is not None and words in said)


def test_an_amd_gpu_is_not_judged_by_nvidia_versions() -> None:
    with patch.object(dispatch, "torch", gpu((3, 0), hip="7.0")):
        assert dispatch.objection(CUDA, 128, 32) is None


def test_no_triton_is_said() -> None:
    with (
        patch.object(dispatch, "torch", gpu((9, 0))),
        patch.object(dispatch, "find_spec", lambda name: None),
    ):
        assert "needs triton" in (dispatch.objection(CUDA, 128, 32) or "")


def test_an_objection_stops_the_start(tmp_path: Path) -> None:
    """Loading fails with the words, before weights are read: these are not weights."""
    folder = tmp_path
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 16,'
        ' "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}'
    )
    with (
        patch.object(dispatch, "objection", lambda *_: "this cannot run"),
        pytest.raises(UsageError, match="this cannot run"),
    ):
        load_model(EngineConfig(model=str(folder)))


def test_devices_that_are_not_there_are_named() -> None:
    with patch("torch.cuda.device_count", lambda: 0), pytest.raises(UsageError, match="--device c"):
        load_model(EngineConfig(device="cuda"))
    for name in ("cuda:2", "cuda:3"):
        with (
            patch("torch.cuda.device_count", lambda: 2),
            pytest.raises(UsageError, match=f"no device '{name}'; there are 2"),
        ):
            load_model(EngineConfig(device=name))


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:1", 1)])
def test_kernels_are_launched_where_the_model_lies(name: str, index: int) -> None:
    """Triton launches on the current device."""
    with (
        patch("torch.cuda.device_count", lambda: 2),
        patch("torch.cuda.set_device") as set_device,
    ):
        assert _device(name) == torch.device(name)
    set_device.assert_called_once_with(index)


def test_a_gpu_pins_rows_only_in_deterministic_mode() -> None:
    fast = EngineConfig(device="cuda", deterministic=False)
    assert _row_tile(EngineConfig(device="cuda"), CUDA) == PINNED_ROWS
    assert _row_tile(fast, CUDA) is None
    assert _row_tile(fast, CPU) == ROW_TILE


def test_eight_bit_keys_and_values_on_demand() -> None:
    kinds: dict[KVPrecision, torch.dtype] = {"fp8": torch.float8_e4m3fn, "auto": torch.float32}
    for kv, dtype in kinds.items():
        config = EngineConfig(device="cuda", kv=kv, kv_memory_mib=1)
        kv_cache = make_kv_cache(config, toy_model().model, 160)
        assert isinstance(kv_cache, KVCache) and kv_cache.data.dtype == dtype


def test_memory_that_is_not_there_is_said() -> None:
    """What torch raises on a device is one line, too."""
    full = torch.OutOfMemoryError("CUDA out of memory")
    with (
        patch("specdec.model.KVCache.__init__", side_effect=full),
        pytest.raises(UsageError, match="1 MiB of KV cache are not to be had"),
    ):
        make_kv_cache(EngineConfig(kv_memory_mib=1), toy_model().model, 160)
    config = Mock()
    config.from_checkpoint.return_value.max_position = 160
    with (
        patch("specdec.loading.checkpoints"),
        patch("specdec.loading.ModelConfig", config),
        patch("specdec.loading.Tokenizer"),
        patch("specdec.loading.ModelWeights.load", side_effect=full),
        pytest.raises(UsageError, match="the weights of some-model do not fit on cpu"),
    ):
        load_model(EngineConfig(model="some-model", backend="torch"))
