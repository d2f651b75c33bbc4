"""How long the stages of an update take, by the host's clock, so that nothing waits for the device."""

from collections.abc import Callable

from dase_grpc.metrics.nodes import LearnerMetrics


class UpdateTiming:
    """Times one update after another. On a GPU the parts of an update show how long it took to start them.

    `begin` comes first, then a `lap` at the end of each of sample, load and weigh, then `finish`, which ends
    learn; an update that is skipped is just not finished.
    """

    def __init__(self, metrics: LearnerMetrics, clock: Callable[[], float]) -> None:
        self._seconds = metrics.stage_seconds
        self._clock = clock
        self._laps: list[tuple[str, float]] = []
        self._last = 0.0

    def begin(self) -> None:
        """An update begins: the batch is asked for."""
        self._laps.clear()
        self._last = self._clock()

    def lap(self, stage: str) -> float:
        """A stage ends; the time, by the clock."""
        now = self._clock()
        self._laps.append((stage, now - self._last))
        self._last = now
        return now

    def finish(self, *, parts: bool) -> float:
        """The update has been made; with `parts` what it consists of counts one by one, too. The time."""
        now = self.lap("learn")
        (_, sample_s), *rest = self._laps
        self._seconds["sample"].observe(sample_s)
        self._seconds["update"].observe(sum(seconds for _, seconds in rest))
        if parts:
            for stage, seconds in rest:
                self._seconds[stage].observe(seconds)
        return now
