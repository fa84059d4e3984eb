"""Asking: whether a drafter is worth asking for a request, when to try again, and how deep."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

COMMON_RATE = 0.03  # of the running mean of what asking brings, over all requests
NUM_FIRST = 8  # asks of a drafter before it can be judged
LEAST_PRICE = 0.004  # tokens; asking that brings less is not worth the bookkeeping
PATIENCE = (3.0, 10.0)  # asks' price, least and most, that may be lost before asking ends
MOST_LOSS = 0.8  # tokens of a request; in between, so much may be lost
RESUME = 1.0  # and that a probe must win to begin it again
FIRST_PROBE, LAST_PROBE = 4, 192  # steps between two probes; doubled after each that fails
PROBE_SHARE = 0.002  # tokens per step that probing may cost
LEVEL_RATE = 0.1
EXPLORE_EVERY = 24  # asks; then one level more than pays is drafted
NUM_DEEP = 4  # requests, of first asks without a limit
NUM_LEVELS = 32  # that are told apart


@dataclass
class Asking:
    """One drafter for one request: asked while what it brings is worth more than it costs.

    What an ask brings varies, so single ones decide nothing: losses are added up, less what good
    asks make up for, and where they exceed so many asks' price, asking ends (Page's CUSUM again).
    A probe that brings that much more than its price begins it again.

    Example: `asking.observe(0.0, price=0.1)` again and again ends in `asking.is_due` False.
    """

    is_on: bool
    loss: float = 0.0  # tokens, in prices
    is_curious: bool = False

    @property
    def is_due(self) -> bool:
        """Whether to ask in the next step, be it a probe or not."""
        return self.is_on or self.is_curious

    def observe(self, value: float, price: float) -> None:
        """It was asked, brought `value` tokens, and cost as much time as `price` tokens take."""
        self.is_curious = False
        self.loss += 1.0 - value / price
        was_on = self.is_on
        if was_on:
            self.loss = max(0.0, self.loss)
            least, most = PATIENCE
            self.is_on = self.loss <= min(max(MOST_LOSS / price, least), most)
        else:
            self.loss = min(0.0, self.loss)
            self.is_on = self.loss < -RESUME
        if self.is_on is not was_on:
            self.loss = 0.0


@dataclass
class Prober:
    """When a drafter that does not pay is tried again: for all its requests at once, less and less
    often as it fails. It also knows what asking brings on the whole, where new requests start.

    The dearer an ask, the longer it may come to wait.
    """

    profit: float = 0.0
    is_on: bool = True
    num_asked: int = 0
    num_judged: int = 0  # asks since the load changed
    num_probes: int = 0
    interval: int = FIRST_PROBE
    wait: int = FIRST_PROBE

    @property
    def is_due(self) -> bool:
        """Whether the next step asks where it is off."""
        return self.wait <= 0

    def restart(self) -> None:
        """The load has changed, and with it what asking is worth."""
        self.num_judged = 0
        self.is_on = True
        self.profit = 0.0
        self.interval = self.wait = FIRST_PROBE

    def start(self) -> Asking:
        """How a new request begins."""
        return Asking(self.is_on)

    def observe(self, value: float, price: float, *, is_probe: bool) -> None:
        """One request was asked."""
        self.num_asked += 1
        self.num_judged += 1
        self.num_probes += is_probe
        rate = max(COMMON_RATE, 1.0 / self.num_judged)
        self.profit += rate * (value - price - self.profit)
        self.is_on = self.num_judged < NUM_FIRST or self.profit > 0.0

    def step(self, *, num_off: int, num_won: int, price: float) -> None:
        """A step is over that probed `num_off` requests, `num_won` of them with success."""
        if not self.is_due:
            self.wait -= 1
        elif num_won * 4 > num_off:
            self.interval = self.wait = FIRST_PROBE
        else:
            longest = min(LAST_PROBE, max(FIRST_PROBE, round(price / PROBE_SHARE)))
            self.interval = self.wait = min(2 * self.interval, longest)


@dataclass
class Levels:
    """How deep a drafter should go that takes a pass of its own for each level.

    Kept per level: what its nodes bring beyond the price of their rows, over all requests, as a
    running mean per ask. The first asks have no limit, to see all levels.

    Example: `levels.deepest(price=0.1, num_asked=4)` is the last level that brings 0.025 tokens
    to each of four requests, where a pass costs the time of 0.1 tokens.
    """

    num_asks: int = 0
    pass_s: float = 0.0
    usual: int = 1  # the last level that pays, without what is explored
    _num_seen: int = 0  # requests
    _values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_LEVELS))
    _ages: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_LEVELS))  # in asks

    def observe(
        self, values: NDArray[np.float64], num_levels: int, seconds: float, num_asked: int
    ) -> None:
        """An ask drafted `num_levels` passes in `seconds`; values: tokens per request, by level."""
        self.num_asks += 1
        self._num_seen += num_asked
        num_levels = min(max(num_levels, 1), NUM_LEVELS)
        rate = max(LEVEL_RATE, 1.0 / self.num_asks)
        self.pass_s += rate * (seconds / num_levels - self.pass_s)
        rates = 1.0 - (1.0 - rate) ** (1.0 + np.minimum(self._ages[:num_levels], 99.0) / 4)
        self._values[:num_levels] += rates * (values[:num_levels] - self._values[:num_levels])
        self._ages += 1.0
        self._ages[:num_levels] = 0.0

    def deepest(self, price: float, num_asked: int) -> int:
        """The last level that pays a pass, which costs `price` tokens, for so many requests."""
        if self._num_seen < NUM_DEEP:
            return NUM_LEVELS
        pays = self._values * num_asked > price
        depth = NUM_LEVELS if pays.all() else max(1, int(np.argmin(pays)))
        self.usual = depth
        if depth == NUM_LEVELS:
            return depth
        first, last = self._values[max(0, depth - 2)], self._values[depth - 1]
        hoped = last * last / max(first, last) if last > 0.0 else 0.0  # as from first to last
        if self._ages[depth] > EXPLORE_EVERY and hoped * num_asked > price:
            depth += 1  # it was not seen lately
        return depth + (self.num_asks % EXPLORE_EVERY == 0)

    def forget(self) -> None:
        """Things have changed: what is deeper than the next ask is worth another look."""
        self._ages[1:] = np.inf
