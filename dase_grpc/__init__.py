"""DASE: K deterministic actor-critics on one shared replay buffer over gRPC."""

import importlib
import os
from typing import Any

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

_PLACES = {
    "PolicyClient": "dase_grpc.inference.client",
    "Session": "dase_grpc.replay.client.session",
}
"""Where a public name is, if not in api.py."""

__all__ = [
    "Began",
    "Ended",
    "Evaluated",
    "Event",
    "Kept",
    "PolicyClient",
    "Run",
    "Session",
    "Stepped",
    "TrainedPolicy",
    "Updated",
    "iterate",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    """The public interface, loaded when it is first asked for: a replay node needs none of it.

    Its types are in `__init__.pyi`.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("dase-grpc")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES.get(name, "dase_grpc.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
