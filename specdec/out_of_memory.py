"""Out of memory: which errors mean it, whoever raised them, and the line that says what to do."""

from __future__ import annotations

OUT_OF_MEMORY = (
    "the engine ran out of memory; lower --kv-memory-mib, --max-running or --token-budget"
)
_WORDS = (
    "out of memory",  # CUDA, through torch or not
    "can't allocate memory",  # torch on a CPU
    "not enough memory",
    "alloc_failed",  # cuBLAS
    "bad_alloc",  # C++
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python, numpy, torch or CUDA.

    torch has an error of its own for the device's memory only, a RuntimeError too.
    Example: `is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to"))`.
    """
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _WORDS)
