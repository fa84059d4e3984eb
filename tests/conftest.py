"""Keeps tests quick and independent of what else the machine does, and names the CPU backends."""

import os
from collections.abc import Iterator

# On a busy machine spinning threads cost more than they gain; commands under test inherit this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch  # OpenMP reads the variable when torch is loaded

# Triton decides when a kernel is defined: compile it for the GPU, or run it in Python on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The toy models are far too small for more threads.
torch.set_num_threads(1)

from specdec.errors import UsageError  # noqa: E402  # defines kernels
from tests.toy import Form, default_form  # noqa: E402  # after the variable above is set


@pytest.fixture(params=[Form("torch"), Form("native")], ids=lambda form: form.backend)
def backend(request: pytest.FixtureRequest) -> Iterator[Form]:
    """Toy models in fp32, once by each of the CPU's forwards: `usefixtures("backend")`."""
    try:
        with default_form(request.param):
            yield request.param
    except UsageError as reason:
        pytest.skip(str(reason))
