"""How often a node of a local cluster is started again after a failure, and after which pause."""

from dataclasses import dataclass, field
from typing import Final

from dase_grpc import backoff
from dase_grpc.errors import LASTING_CODES, USAGE_CODE

MAX_RESTARTS: Final = 5
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
HEALTHY_S: Final = 300.0
"""A replay that ran for that long is well: what failed before counts no more."""

IN_ALL: Final = 20
"""How many times its restarts in a row a node has in all, whatever it gets done in between."""


def is_lasting(code: int, *, at_restart: bool = False) -> bool:
    """Whether a process that ended with this exit code would end so again, however often it is started.

    `at_restart` is before one that took the place of another was heard of. What it refuses as a matter of
    usage may pass then: its port, for example, which another program has taken in the pause.
    """
    return code in LASTING_CODES and not (at_restart and code == USAGE_CODE)


@dataclass
class RestartPolicy:
    """Decides for one node. Plain and synchronous; the caller brings the time.

    Attributes:
        limit: restarts in a row, without having got on in between, after which it is given up.
        failures: how many there have been in a row.
        restarts: how many there have been in all; `IN_ALL` times the limit is the most.
    """

    limit: int = MAX_RESTARTS
    failures: int = field(default=0, init=False)
    restarts: int = field(default=0, init=False)
    _step: int | None = field(default=None, init=False)

    def pause_s(self, *, ran_s: float, step: int | None = None) -> float | None:
        """Seconds until the node that failed after having run for `ran_s` is started again.

        1, 2, 4, ... and never more than `LONGEST_PAUSE_S`; None when it is given up. `step` is the newest
        checkpoint of a learner. A learner has got on if that is newer than at its last failure: else it
        may fail at the same step for ever, however long it takes to get there. A replay has got on if it
        was well for a while.
        """
        got_on = ran_s >= HEALTHY_S if step is None else self._step is None or step > self._step
        self._step = step
        if got_on:
            self.failures = 0
        if self.failures >= self.limit or self.restarts >= IN_ALL * self.limit:
            return None
        self.failures += 1
        self.restarts += 1
        return backoff.pause_s(self.failures - 1, first_s=FIRST_PAUSE_S, cap_s=LONGEST_PAUSE_S)
