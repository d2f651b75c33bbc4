"""An experiment's Job runs: podman plays its pods here; one is killed and drained while it trains."""

import os
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml
from children import ran
from deploy.cells import NAME, cells_file, curves, table
from deploy.deployed import PROJECT
from deploy.imaging import Builder
from deploy.playing import Played, alone_with_podman
from patience import PATIENCE_S
from pods.machine import Machine
from pods.podman import Podman
from pods.translation import Manifest, Release

from dase_grpc.launch.experiments.folder import FINISHED_FILE
from dase_grpc.runs.directory import RunDirectory, round_paths

CELLS, STEPS = 4, 3_000
LONG = f"steps-{STEPS}_seed-0"
"""The first cell, which trains long enough to be stopped twice in the middle."""

SITE = {"image": "localhost/dase:full", "claim": "runs", "at_once": 2, "memory": "1GiB", "retries": 1}


@pytest.fixture
def podman(builder: Builder, tmp_path: Path) -> Iterator[Podman]:
    with alone_with_podman(builder, tmp_path / "played", "full") as made:
        yield made


def written(folder: Path) -> list[dict[str, Any]]:
    """The manifests that `dase experiment` writes."""
    (folder / "cells.toml").write_text(
        tomli_w.dumps(cells_file(CELLS, long=STEPS, kubernetes=SITE)), encoding="utf-8"
    )
    command = [sys.executable, "-m", "dase_grpc", "experiment", "cells.toml", "--on=kubernetes"]
    done = ran(*command, cwd=folder, env={**os.environ, "PYTHONPATH": str(PROJECT)}, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def on_one_machine(job: Manifest, name: str, claim: str) -> dict[str, Any]:
    """A pod like the Job's that runs the whole experiment by itself."""
    spec = deepcopy(job["spec"]["template"]["spec"])
    (container,) = spec["containers"]
    del container["env"], container["resources"]
    container["args"] = [each for each in container["args"] if not each.startswith("--cell=")]
    (runs,) = (each for each in spec["volumes"] if each["name"] == "runs")
    runs["persistentVolumeClaim"]["claimName"] = claim
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.faults
@pytest.mark.timeout(PATIENCE_S * 8)
def test_every_cell_finishes_once_however_its_pods_end_and_the_table_is_that_of_one_machine(podman, tmp_path):
    manifests = written(tmp_path)
    (job,) = Release(tuple(manifests)).of("Job")
    release = Release((*manifests, on_one_machine(job, "alone", claim="alone")))
    said: list[str] = []
    machine = Machine(release, podman, tmp_path, say=said.append)
    played = Played(machine, podman, tmp_path)
    for pod in release.pods():
        machine.begin(pod)
    first = f"{job['metadata']['name']}-0"
    stopped_in_the_middle(played, said, first)
    played.until(lambda: machine.complete, "the Job is over")
    played.until(lambda: "alone" in machine.codes, "the experiment on one machine is over")
    (again,) = Release((on_one_machine(job, "again", claim="runs"),)).pods()
    machine.play(again)
    played.until(lambda: "again" in machine.codes, "the table is shown")
    assert set(machine.codes.values()) == {0}, played.said()
    assert "all cells are finished" in machine.log("again")
    assert "Traceback" not in played.said()

    ends = {f"{job['metadata']['name']}-{index}": ["0"] for index in range(CELLS)} | {
        first: ["137", "130", "0"]
    }
    assert {name: ended(said, name) for name in ends} == ends
    runs = played.claim("runs") / NAME
    assert not (runs / ".experiment" / "set-aside").exists()
    assert len(RunDirectory.open(runs / LONG).run["resumed"]) == 2
    assert len(table(machine.log("again"))) == len(list(runs.glob(f"*/{FINISHED_FILE}"))) == CELLS
    assert table(machine.log("again")) == table(machine.log("alone"))
    assert curves(runs) == curves(played.claim("alone") / NAME)


def stopped_in_the_middle(played: Played, said: list[str], name: str) -> None:
    """Kills the pod of the long cell, and drains the next one; each time it has kept something new."""
    played.until(lambda: name in played.machine.lives, "the first pod is there")
    rounds = played.claim("runs") / NAME / LONG / "replay"
    played.until(lambda: bool(round_paths(rounds)), "something is kept")
    played.machine.kill(name)
    played.until(lambda: ended(said, name) == ["137"], "it is gone")
    kept = max(round_paths(rounds))
    played.until(lambda: max(round_paths(rounds), default=0) > kept, "something more is kept")
    played.machine.drain(name)


def ended(said: list[str], name: str) -> list[str]:
    """The exit codes of a pod's containers."""
    return re.findall(rf"^{name}: ended with code (-?\d+)$", "\n".join(said), re.MULTILINE)
