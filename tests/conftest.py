"""Keeps tests quick and independent of what else the machine does."""

from specdec.threads import sleep_while_waiting

sleep_while_waiting()

import torch  # noqa: E402  # the line above must come first

# The toy models are far too small for more threads, whose barriers suffer from a busy machine.
torch.set_num_threads(1)
