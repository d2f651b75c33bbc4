"""Runs on disk that a test kills and starts again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_cases import SCHEMA

from dase_grpc.replay.buffer.leases import Lease
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.schema import TransitionSchema

TTL_S = 10.0


class Runs:
    """Starts of the replay on one directory; each is closed, in the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started: list[SharedRun] = []

    def start(
        self,
        *,
        run_id: str = "run-a",
        capacity: int | str = 10,
        min_size: int = 1,
        boot_id: str = "b",
        now: float = 0.0,
    ) -> SharedRun:
        run = SharedRun(run_id, capacity=capacity, min_size=min_size, seed=0, ttl_s=TTL_S)
        self.started.append(run.keep_in(self.path, boot_id=boot_id, now=now))
        return run

    def kill(self, run: SharedRun) -> None:
        """Ends a start as a kill does: the kernel lets the lock go, and nothing else happens."""
        assert run._disk is not None
        run._disk.directory.close()
        self.started.remove(run)

    def killed(self, **options: Any) -> SharedRun:
        """A start that one agent has joined, and that was killed then."""
        run = self.start(**options)
        join(run)
        self.kill(run)
        return run

    def close(self, run: SharedRun) -> None:
        run.close()
        self.started.remove(run)


@pytest.fixture
def runs(tmp_path) -> Iterator[Runs]:
    runs = Runs(tmp_path / "deep" / "data")
    yield runs
    for run in [*runs.started]:
        runs.close(run)


def join(
    run: SharedRun,
    *,
    wanted: int | None = 0,
    schema: TransitionSchema = SCHEMA,
    now: float = 0.0,
    node_id: str = "",
) -> Lease:
    return run.join("node", wanted=wanted, run_id="", schema=schema, now=now, node_id=node_id)
