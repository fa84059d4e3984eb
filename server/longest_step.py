"""Longest step: for how long an engine may be in one step before it counts as hanging."""

from __future__ import annotations

import time

from specdec.adaptive import AdaptiveController
from specdec.cost_profile import Forward, ForwardTimer
from specdec.engine import Engine
from specdec.kernels import dispatch

MARGIN = 5.0  # for other load, several long contexts at once, and drafters
COMPILE_S = 60.0  # a kernel that a step needs first may have to be compiled and recorded in it
MEASURED_CONTEXT = 4096


def longest_step_s(engine: Engine) -> float:
    """Seconds: five times a forward of a whole token budget at the longest context.

    From the controller's cost model where there is one, else measured, which overwrites the KV
    cache: call it before the first request.
    """
    config, longest = engine.config, engine.max_model_len
    if isinstance(engine.controller, AdaptiveController):
        forwards = engine.controller.cost.forward_s(1, longest, config.token_budget)
        forward_s = float(forwards[config.token_budget])
    else:
        forward_s = _measured_s(engine) * max(1.0, longest / MEASURED_CONTEXT)
    compile_s = COMPILE_S if dispatch.uses_triton(engine.runner.kv_cache.device) else 0.0
    return MARGIN * forward_s + compile_s


def _measured_s(engine: Engine) -> float:
    timer = ForwardTimer(engine.loaded, engine.runner, time.perf_counter)
    num_rows = min(engine.config.token_budget, timer.room - 1)
    context = min(MEASURED_CONTEXT, timer.room - num_rows)
    return timer.seconds(Forward(1, context, num_rows), deadline=timer.clock())
