"""Keeps tests quick and independent of what else the machine does."""

import os

# On a busy machine spinning threads cost more than they gain; commands under test inherit this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # OpenMP reads the variable when torch is loaded

# Triton decides when a kernel is defined: compile it for the GPU, or run it in Python on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The toy models are far too small for more threads.
torch.set_num_threads(1)
