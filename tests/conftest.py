"""Keeps tests quick and independent of what else the machine does."""

import torch

# The toy models are far too small for more threads, whose barriers suffer from a busy machine.
torch.set_num_threads(1)
