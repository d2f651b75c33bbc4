"""`dase experiment` as a person runs it: real trainings in lockstep, and every way in which it can end."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from integration.commands import ENDLESS, Command, assert_kept_until_the_end, living
from launch.resuming import assert_equal
from patience import wait_until
from small import SETTINGS

from dase_grpc.errors import RunDirectoryError
from dase_grpc.launch.experiments.folder import FINISHED_FILE, ExperimentFolder
from dase_grpc.launch.experiments.task import NOTHING_KEPT, STOPPED
from dase_grpc.runs.directory import RunDirectory, round_paths
from dase_grpc.runs.logs import read_evaluations

pytestmark = pytest.mark.slow


class Experiment:
    """An experiment's file in a folder of its own, and the `dase experiment` processes started on it."""

    def __init__(self, folder: Path, **tables: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.name = f"{folder.parent.name}-{folder.name}"
        self.path = folder / "runs" / self.name
        self.started: list[Command] = []
        self.write(**tables)

    def write(
        self, *, matrix: dict[str, Any], settings: dict[str, Any] | None = None, **more: object
    ) -> None:
        """Makes the file; settings beyond those of `small` are given with dots."""
        common = {
            f"{section}.{key}": value for section, keys in SETTINGS.items() for key, value in keys.items()
        }
        common = {key: value for key, value in (common | (settings or {})).items() if key not in matrix}
        tables = {"name": self.name, "set": common, "matrix": matrix, **more}
        (self.folder / "experiment.toml").write_text(tomli_w.dumps(tables))

    def start(self, *flags: object) -> Command:
        self.started.append(Command(self.folder, "experiment", "experiment.toml", *flags))
        return self.started[-1]

    def run(self, *flags: object) -> int:
        return self.start(*flags).end()

    @property
    def output(self) -> str:
        return self.started[-1].output

    def children(self) -> dict[str, int]:
        """The pids of this experiment's trainings that live, by cell, whoever started them."""
        found = {}
        for pid, command in living("--stdin-is-leash", f"--runs=runs/{self.name}"):
            name = next(part for part in command if part.startswith("--name="))
            found[name.removeprefix("--name=")] = pid
        return found

    def finished(self) -> set[str]:
        return {mark.parent.name for mark in self.path.glob(f"*/{FINISHED_FILE}")}

    def trains(self, cell: str) -> bool:
        """Whether all agents of a cell have begun to train and still do."""
        if cell not in self.children() or not (self.path / cell / "run.toml").exists():
            return False
        run = RunDirectory.open(self.path / cell)
        agents = [run.agent(agent_id) for agent_id in range(run.config.train.agents)]
        return all(len(read_evaluations(agent.evaluations.path)) >= 3 for agent in agents)

    def kept(self, cell: str) -> bool:
        """Whether a cell that trains has kept a round."""
        return self.trains(cell) and bool(round_paths(self.path / cell / "replay"))

    def until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: self.output)

    def curves(self) -> dict[str, list[str]]:
        """All evaluations of all cells, but for the times."""
        files = self.path.glob("*/agents/*/evaluations.csv")
        return {
            str(file.relative_to(self.path)): [line.rpartition(",")[0] for line in file.read_text().split()]
            for file in files
        }

    def files(self, cell: str) -> dict[str, tuple[int, int]]:
        """Inode and time of change of every file of a cell."""
        stats = {path: path.stat() for path in (self.path / cell).rglob("*") if path.is_file()}
        return {str(path): (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.fixture
def experiment(tmp_path) -> Iterator[Callable[..., Experiment]]:
    made = []

    def make(name: str = "one", **tables: Any) -> Experiment:
        made.append(Experiment(tmp_path / name, **tables))
        return made[-1]

    yield make
    for each in made:
        for command in each.started:
            if command.process.poll() is None:
                command.end(signal.SIGKILL)
        for pid in each.children().values():
            os.kill(pid, signal.SIGKILL)


# -- an experiment that ends well ---------------------------------------------------------------------


def test_an_experiment_runs_every_cell_once_and_the_next_time_none(experiment):
    one = experiment(matrix={"method": ["single", "dase"], "dps.divergence": ["jeffreys", "none"]})
    assert one.run() == 0, one.output
    cells = {"single", "dase_divergence-jeffreys", "dase_divergence-none"}
    assert one.finished() == cells
    assert one.children() == {}
    assert "note: 4 combinations are 3 cells" in one.output
    assert re.search(r"^dase_divergence-none +finished +-\d+\.\d  \d+ s$", one.output, re.MULTILINE)
    assert one.output.splitlines()[-1].endswith(f"-m dase_grpc compare runs/{one.name}")
    run = RunDirectory.open(one.path / "dase_divergence-none")
    assert (run.run["mode"], run.config.dps.divergence, run.report.is_file()) == ("lockstep", "none", True)
    before = {cell: one.files(cell) for cell in cells}
    assert one.run() == 0
    assert "all cells are finished" in one.output
    assert "started" not in one.output
    assert {cell: one.files(cell) for cell in cells} == before


@pytest.mark.long
def test_cells_may_be_clusters(experiment):
    one = experiment(mode="cluster", matrix={"train.agents": [1, 2]})
    assert one.run("--jobs", 5) == 0, one.output
    assert one.finished() == {"agents-1", "agents-2"}
    run = RunDirectory.open(one.path / "agents-2")
    assert (run.run["mode"], len(run.agents())) == ("cluster", 2)
    assert not run.replay.exists()


def test_one_cell_is_run_alone_and_goes_on_after_a_stop(experiment):
    one = experiment(settings={"train.steps": ENDLESS, "train.checkpoint_every": 50}, matrix={"seed": [0, 1]})
    replay = one.path / "seed-1" / "replay"
    command = one.start("--cell", "seed-1")
    command.until(lambda: replay.is_dir() and bool(round_paths(replay)))
    assert command.end(signal.SIGTERM) == STOPPED
    assert not (one.path / "seed-0").exists()
    again = one.start("--cell", "seed-1")
    again.until(lambda: "seed-1 goes on from step " in again.output)
    assert again.end(signal.SIGTERM) in (STOPPED, NOTHING_KEPT)
    assert not (one.path / ".experiment" / "set-aside").exists()


# -- the other ends -----------------------------------------------------------------------------------


def test_a_cell_that_fails_is_named_and_the_others_finish_and_it_is_tried_again(experiment):
    kwargs = [{"at": 200}, {"at": 9}]
    one = experiment(settings={"env.id": "worlds:RaisesAtStep"}, matrix={"env.kwargs": kwargs})
    assert one.run() == 1
    failing = {"kwargs-at-9"}
    assert one.finished() == {"kwargs-at-200"}
    for cell in failing:
        log = f"runs/{one.name}/.experiment/logs/{cell}.log"
        (told,) = (
            line for line in one.output.splitlines() if line.startswith(f"failed: {cell}: exit code 1, ")
        )
        assert "the environment raised RuntimeError: the simulator broke at step 9" in told
        assert told.endswith(f"; its log is {log}")
        assert "Traceback" in (one.folder / log).read_text()
    assert "1 of 2 cells failed; to try again: " in one.output
    assert one.run("--dry-run") == 0
    assert "2 cells: 1 finished, 1 failed" in one.output
    assert one.run() == 1
    assert one.output.count(": started") == 1


@pytest.mark.long
def test_a_killed_experiment_leaves_no_training_and_the_next_one_finishes_it(experiment):
    """And what it has in the end is, evaluation for evaluation, what an undisturbed one has."""
    matrix = {"seed": [0, 1]}
    settings = {"train.steps": 600, "eval.every": 50, "train.checkpoint_every": 50}
    killed = experiment("killed", matrix=matrix, settings=settings, keep_buffers=True)
    command = killed.start("--jobs", 1)
    command.until(lambda: len(killed.finished()) == 1 and any(map(killed.kept, killed.children())))
    (interrupted,), done = killed.children(), killed.finished()
    before = {cell: killed.files(cell) for cell in done}
    command.end(signal.SIGKILL)
    assert killed.run("--jobs", 2) == 0, killed.output  # at once, while the child may still be there
    assert killed.children() == {}
    assert killed.finished() == {"seed-0", "seed-1"}
    assert {cell: killed.files(cell) for cell in done} == before
    assert f"{interrupted} goes on from step " in killed.output
    assert not (killed.path / ".experiment" / "set-aside").exists()
    run = RunDirectory.open(killed.path / interrupted)
    assert run.run["resumed"][0]["from_steps"][0] > 0
    undisturbed = experiment("undisturbed", matrix=matrix, settings=settings, keep_buffers=True)
    assert undisturbed.run() == 0, undisturbed.output
    assert len(undisturbed.curves()) == 4
    assert killed.curves() == undisturbed.curves()
    for cell in killed.finished():
        assert_equal(RunDirectory.open(undisturbed.path / cell), RunDirectory.open(killed.path / cell))


@pytest.mark.parametrize("mode", ["lockstep", pytest.param("cluster", marks=pytest.mark.long)])
def test_trainings_end_by_themselves_when_the_experiment_is_killed(experiment, mode):
    one = experiment(mode=mode, settings={"train.steps": ENDLESS}, matrix={"seed": [0, 1]})
    command = one.start("--jobs", 6)
    command.until(lambda: one.trains("seed-0") and one.trains("seed-1"))
    command.end(signal.SIGKILL)
    one.until(lambda: one.children() == {})
    for cell in ("seed-0", "seed-1"):
        assert_kept_until_the_end(RunDirectory.open(one.path / cell))


@pytest.mark.parametrize("told", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_stops_all_keeps_checkpoints_and_says_how_to_go_on(experiment, told):
    one = experiment(settings={"train.steps": ENDLESS}, matrix={"seed": [0, 1, 2]})
    command = one.start("--jobs", 2)
    command.until(lambda: one.trains("seed-0") and one.trains("seed-1"))
    with (
        pytest.raises(RunDirectoryError, match=rf"another dase experiment runs in .*{one.name}; wait for"),
        ExperimentFolder(one.path).locks.all_cells(print),
    ):
        pass
    assert command.end(told) == STOPPED
    assert one.children() == {}
    assert "stopping: the running cells keep their checkpoints (Ctrl-C kills)" in one.output
    assert one.output.splitlines()[-1].startswith("stopped before the end; to go on: ")
    assert one.output.splitlines()[-1].endswith(" -m dase_grpc experiment experiment.toml --jobs 2")
    assert not (one.path / "seed-2").exists()
    assert_kept_until_the_end(RunDirectory.open(one.path / "seed-0"))
    assert one.run("--dry-run") == 0
    assert re.search(
        r"^seed-1 .* unfinished: stopped at step [\d,]+ of 10,000,000$", one.output, re.MULTILINE
    )
