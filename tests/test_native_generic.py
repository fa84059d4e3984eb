"""The C++ forward as compiled for other processors: without AMX, bf16, or AVX-512 at all."""

from __future__ import annotations

import ctypes
import platform
from unittest.mock import patch

import pytest
import torch

from specdec.kernels import native_library
from specdec.native_weights import FORMATS
from tests.native_oracle import expected_logits
from tests.native_session import KV_PRECISIONS, PRECISIONS, SMALL, Job, NativeSession
from tests.native_session import native_library as shared_library

# (-march, what /proc/cpuinfo must list to run it)
TARGETS = {
    "x86-64-v3": {"avx2", "fma", "bmi2"},
    "x86-64-v4": (avx512 := {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "cooperlake": avx512 | {"avx512_bf16", "avx512_vnni"},
}
FIELDS = SMALL | {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 80,
    "use_sliding_window": True,
    "sliding_window": 100,
    "max_window_layers": 1,
    "num_hidden_layers": 2,
}
JOBS = [Job(270, (3, 40, 257), 17, 5, seed=1), Job(33, (16,), 4, 1, seed=2)]


@pytest.fixture(scope="module", params=TARGETS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    """The library for a processor that has no more than the target; one compilation each."""
    shared_library()  # skips where there is no compiler
    if platform.machine() != "x86_64":
        pytest.skip(f"no variants to compile for {platform.machine()}")
    with open("/proc/cpuinfo") as file:
        flags = next(line for line in file if line.startswith("flags")).split()
    if missing := TARGETS[request.param] - set(flags):
        pytest.skip(f"this processor cannot run {request.param}: it lacks {', '.join(missing)}")
    others = [flag for flag in native_library.FLAGS if not flag.startswith("-march")]
    with patch.object(native_library, "FLAGS", (*others, f"-march={request.param}")):
        return native_library.load(tmp_path_factory.mktemp(request.param))


def session(library: ctypes.CDLL, precision: str, kv: str, num_threads: int = 1) -> NativeSession:
    return NativeSession(FIELDS, precision, kv, num_threads=num_threads, library=library)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kv", KV_PRECISIONS)
def test_logits_are_the_oracles_and_the_same_bits(
    library: ctypes.CDLL, precision: str, kv: str
) -> None:
    got = session(library, precision, kv, num_threads=2).run(JOBS, seed=3)
    for job, logits in zip(JOBS, got, strict=True):
        tokens, root = job.token_ids(FIELDS["vocab_size"]), job.num_known - 1
        want, tolerance = expected_logits(FIELDS, precision, kv, tokens, job.parents)
        torch.testing.assert_close(logits.double(), want, rtol=0, atol=tolerance)
        for path in job.leaf_paths:
            rows = [*range(root), *(root + node for node in path)]
            alone = session(library, precision, kv).alone([tokens[row] for row in rows])
            assert torch.equal(logits[rows], alone)


@pytest.mark.parametrize("precision", FORMATS)
def test_weights_are_packed_alike(library: ctypes.CDLL, precision: str) -> None:
    """Bit by bit as by the library for this processor, NaN and infinity too."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(64, 96, generator=generator) * 10 ** torch.linspace(-9, 4, 64)[:, None]
    if precision in ("fp32", "bf16"):
        weight = torch.randint(-(2**31), 2**31, (64, 96), generator=generator).int()
        weight = weight.view(torch.float32)
    panels = []
    for packer in (library, shared_library()):
        size = packer.specdec_panel_bytes(FORMATS[precision], 96)
        panels.append(torch.zeros(64 // native_library.LANES * size, dtype=torch.uint8))
        packer.specdec_pack(FORMATS[precision], weight.data_ptr(), 64, 96, 0, panels[-1].data_ptr())
    assert torch.equal(*panels)
