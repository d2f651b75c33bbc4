"""DASE: K deterministic actor-critics on one shared replay buffer over gRPC."""

import os
from typing import TYPE_CHECKING, Any

# gRPC would restart its poller in every child that is forked, also in one that is about to become another
# program: such a child can die before it has (https://github.com/grpc/grpc/issues/43055). Nothing here forks
# to go on in the same program. Read while grpc is imported, so it has to be set before that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# gRPC writes a line for each handshake that fails, so whoever reaches the port could fill the log; the replay
# counts them instead (replay/security/door.py).
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# NumPy's products here are those of a single observation. On several threads OpenBLAS would have all cores
# spin between two of them; read while numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if TYPE_CHECKING:
    from dase_grpc.api import (
        Began,
        Ended,
        Evaluated,
        Event,
        Kept,
        Policy,
        Run,
        Stepped,
        Updated,
        iterate,
        load,
        train,
    )
    from dase_grpc.replay.client.session import Session

__all__ = [
    "Began",
    "Ended",
    "Evaluated",
    "Event",
    "Kept",
    "Policy",
    "Run",
    "Session",
    "Stepped",
    "Updated",
    "iterate",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    """The public interface, loaded when it is first asked for: a replay node needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Session":
        from dase_grpc.replay.client.session import Session

        return Session
    from dase_grpc import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
