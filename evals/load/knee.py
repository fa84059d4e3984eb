"""Knee: the load from which on more of it costs more than it brings.

At each level the power is throughput over response time (Kleinrock 1979, "Power and deterministic
rules of thumb"); the knee is where it is greatest. For clients that wait for their answers,
response time is clients over throughput (Little), so power grows as long as doubling them brings
more than 1.41 times the tokens. No threshold is to be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_REFUSED = 0.01  # of the requests; a level that serves fewer is beyond the knee


def knee(
    throughputs: Sequence[float],
    responses_s: Sequence[float | None],
    refused: Sequence[float] | None = None,
) -> int | None:
    """The level, of levels in rising order, at which throughput over response time is greatest.

    responses_s: mean seconds per answer, None of none. refused: the share of requests that got no
    answer. None if no level can be judged, or if power still grows at the last: the knee lies
    beyond what was measured.

    Example: `knee([10, 20, 30, 30], [1.0, 1.0, 1.0, 1.33]) == 2`.
    """
    shares = refused or [0.0] * len(throughputs)
    powers = [
        throughput / response if response and share <= MAX_REFUSED else 0.0
        for throughput, response, share in zip(throughputs, responses_s, shares, strict=True)
    ]
    best = max(range(len(powers)), key=powers.__getitem__, default=None)
    if best is None or not powers[best] or best == len(powers) - 1:
        return None
    return best
