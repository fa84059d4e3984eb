"""LoadRun: all that was sent at one level, and the time over which rates are taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specdec.evals.client.exchange import Exchange
from specdec.evals.load.client_watch import ClientBusy
from specdec.evals.load.level import Level


@dataclass(frozen=True)
class Sent:
    """The index-th request of a level. `due_at` is when it was to be sent, of `perf_counter`."""

    index: int
    due_at: float
    exchange: Exchange
    is_counted: bool

    @property
    def late_s(self) -> float:
        """How much later than due it was sent: what the client itself adds."""
        return self.exchange.sent_at - self.due_at

    @property
    def end_at(self) -> float:
        """When its answer had ended, of `perf_counter`."""
        return self.exchange.sent_at + self.exchange.end_s


@dataclass(frozen=True)
class LoadRun:
    """`sent` are all requests by index, also those that are not counted.

    Rates are taken from `begin_at`, when the warm-up was over, to `end_at`, when the last counted
    request had ended. `stopped` says why the level was given up, if it was.
    """

    level: Level
    sent: tuple[Sent, ...]
    begin_at: float
    end_at: float
    busy: ClientBusy
    stopped: str = ""

    @property
    def counted(self) -> list[Sent]:
        """The requests whose times are the level's."""
        return [sent for sent in self.sent if sent.is_counted]

    @property
    def duration_s(self) -> float:
        """Over which rates are taken."""
        return self.end_at - self.begin_at

    def is_within(self, at: float) -> bool:
        """Whether a moment belongs to that time; its first instant does not."""
        return self.begin_at < at <= self.end_at

    def token_times(self) -> Iterator[tuple[float, float]]:
        """When output tokens arrived within that time, of all requests, and how many each time.

        Where the server did not count as it went, each piece of an answer stands for as many.
        """
        for sent in self.sent:
            exchange = sent.exchange
            arrivals = exchange.arrivals
            is_told = all(arrival.num_tokens is not None for arrival in arrivals)
            each = exchange.num_output / max(1, len(arrivals))
            for arrival in arrivals:
                at = exchange.sent_at + arrival.at_s
                if self.is_within(at):
                    yield at, float(arrival.num_tokens or 0) if is_told else each
