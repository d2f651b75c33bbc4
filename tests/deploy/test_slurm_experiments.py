"""An experiment in a real Slurm of this machine: two nodes that are one, a submitter that is killed."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from children import ran
from deploy.cells import NAME, cells_file, curves, table
from deploy.deployed import PROJECT
from patience import PATIENCE_S, wait_until

from dase_grpc.launch.experiments.folder import FINISHED_FILE
from dase_grpc.runs.directory import RunDirectory, round_paths

CELLS, STEPS = 12, 6_000
LONG = f"steps-{STEPS}_seed-0"
FILE = cells_file(CELLS, long=STEPS, slurm={"at_once": 4, "memory": "300MiB", "time_minutes": 10})


class Submitter:
    """A `dase experiment` in a folder of its own, beside the file, and what its cells have left there."""

    def __init__(self, slurm: Any, folder: Path) -> None:
        self.slurm, self.folder, self.path = slurm, folder, folder / "runs" / NAME
        folder.mkdir()
        (folder / "cells.toml").write_text(tomli_w.dumps(FILE), encoding="utf-8")

    def command(self, *flags: str) -> list[str]:
        return [sys.executable, "-m", "dase_grpc", "experiment", "cells.toml", *flags]

    def start(self, *flags: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*flags), cwd=self.folder, env=self.environment, stdout=subprocess.DEVNULL
        )

    @property
    def environment(self) -> dict[str, str]:
        return {**self.slurm.environment, "PYTHONPATH": str(PROJECT)}

    def run(self, *flags: str) -> str:
        """What it says, once all cells are finished."""
        done = ran(*self.command(*flags), cwd=self.folder, env=self.environment, timeout=3 * PATIENCE_S)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.said()}"
        return done.stdout

    def finished(self) -> int:
        return len(list(self.path.glob(f"*/{FINISHED_FILE}")))

    def has_kept(self, cell: str) -> bool:
        return bool(round_paths(self.path / cell / "replay"))

    def until(self, holds: Callable[[], bool]) -> None:
        wait_until(holds, self.said)

    def said(self) -> str:
        logs = sorted(self.path.glob(".experiment/slurm/*/*.out"))
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S * 8)
def test_every_cell_finishes_once_whoever_goes_on_and_the_table_is_that_of_one_machine(slurm, tmp_path):
    """The submitter is killed, a node is drained, and a cell's time is up, all in the middle."""
    cluster = Submitter(slurm, tmp_path / "cluster")
    first = cluster.start("--on", "slurm")
    try:
        cluster.until(lambda: cluster.has_kept(LONG))
        # As --signal=USR2@120 before the limit; of a whole task of an array scancel tries it ten times over.
        slurm.run("scancel", "--signal=USR2", f"{job_of(slurm, 0)}.0")
        cluster.until(lambda: cluster.finished() >= 3)
    finally:
        first.kill()
        first.wait(PATIENCE_S)
    assert cluster.finished() < CELLS
    slurm.run("scontrol", "update", "nodename=node1", "state=drain", "reason=tried")
    listed = cluster.run("--on", "slurm", "--dry-run")
    assert re.search(r"queued: job \d+_\d+ is (pending|running)", listed)
    second = cluster.start("--on", "slurm")
    for count in range(CELLS + 1):
        cluster.until(lambda count=count: cluster.finished() >= count)
    assert second.wait(PATIENCE_S) == 0, cluster.said()
    said = cluster.run("--on", "slurm")
    assert "all cells are finished" in said
    assert len(list(cluster.path.glob(".experiment/slurm/*"))) == 1  # nothing was queued twice
    assert not (cluster.path / ".experiment" / "set-aside").exists()
    assert len(RunDirectory.open(cluster.path / LONG).run["resumed"]) == 1
    assert "Traceback" not in cluster.said()
    assert slurm.run("squeue", "--noheader") == ""
    alone = Submitter(slurm, tmp_path / "alone")
    assert table(alone.run()) == table(said)
    assert len(table(said)) == CELLS
    assert curves(alone.path) == curves(cluster.path)


def job_of(slurm: Any, index: int) -> str:
    """The job of a task of the one array."""
    shown = slurm.run("squeue", "--noheader", "--array", "--states=RUNNING", "--format=%F_%K")
    (job,) = (job for job in shown.split() if job.endswith(f"_{index}"))
    return job
