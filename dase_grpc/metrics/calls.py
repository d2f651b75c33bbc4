"""Counters of a service's calls, which one event loop writes and /metrics reads when scraped.

They are plain lists and dictionaries: one observation takes 0.14 µs, of a Prometheus histogram 0.8 µs, and
a replay observes each chunk and each batch. All that is counted of a batch takes it 0.7 µs.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

REQUEST_SECONDS: Final = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0
)  # fmt: skip
WAIT_SECONDS: Final = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Durations:
    """A histogram. One thread observes, any thread may read; nothing locks.

    Args:
        bounds: the upper bounds of the buckets in seconds, ascending, each its bucket's own.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one duration."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self._sum_s += seconds

    def read(self) -> tuple[list[int], float]:
        """How many there were by bucket, those above the last bound in the end, and their sum in seconds."""
        return list(self._counts), self._sum_s


class Calls:
    """Counts the calls of one server and what goes over them.

    Keys are the names of methods that the server has, so their number is bounded.

    Args:
        rpcs: methods that are shown before their first call.
        clock: seconds from any start.

    Attributes:
        handled: calls that have ended, by method, kind (`unary`, `client_stream`, `server_stream`,
            `bidi_stream`) and the name of their status.
        received_bytes: of messages, without gRPC's framing; also `sent_bytes`.
        sample_wait: how long batches that were asked for had to wait for transitions.
    """

    def __init__(self, rpcs: Iterable[str] = (), *, clock: Callable[[], float] = time.perf_counter) -> None:
        none_yet = dict.fromkeys(rpcs, 0)
        self.clock = clock
        self.handled: Counter[tuple[str, str, str]] = Counter()
        self.received_bytes: Counter[str] = Counter(none_yet)
        self.sent_bytes: Counter[str] = Counter(none_yet)
        self.sample_wait = Durations(WAIT_SECONDS)
        self._requests: dict[str, Durations] = {}

    def requests(self, rpc: str) -> Durations:
        """How long one request of a method took: a call, or a chunk or a batch of a stream."""
        return self._requests.setdefault(rpc, Durations(REQUEST_SECONDS))

    @property
    def timed(self) -> dict[str, Durations]:
        """All that `requests` has given, a copy."""
        return dict(self._requests)
