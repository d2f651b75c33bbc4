"""How often a node of a local cluster is started again after a failure, and after which pause."""

from dataclasses import dataclass, field
from typing import Final

from dase_grpc.errors import LASTING_CODES

MAX_RESTARTS: Final = 5
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
HEALTHY_S: Final = 300.0
"""A node that ran for that long is well: what failed before counts no more."""


def is_lasting(code: int) -> bool:
    """Whether a process that ended with this exit code would end so again, however often it is started."""
    return code in LASTING_CODES


@dataclass
class RestartPolicy:
    """Decides for one node. Plain and synchronous; the caller brings the time.

    Attributes:
        limit: restarts in a row, without having been well in between, after which it is given up.
        failures: how many there have been in a row.
    """

    limit: int = MAX_RESTARTS
    failures: int = field(default=0, init=False)

    def pause_s(self, *, ran_s: float) -> float | None:
        """Seconds until the node that failed after having run for `ran_s` is started again.

        1, 2, 4, ... and never more than `LONGEST_PAUSE_S`; None when it is given up.
        """
        if ran_s >= HEALTHY_S:
            self.failures = 0
        if self.failures >= self.limit:
            return None
        pause_s: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.failures, 16))
        self.failures += 1
        return pause_s
