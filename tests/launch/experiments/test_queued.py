"""Cells that a cluster's jobs run: what is seen of them in files, and how each of their ends is told."""

import asyncio
import io
from pathlib import Path

import pytest
from contracts.sentences import assert_one_sentence
from launch.experiment_cases import small_cells, trained
from patience import PATIENCE_S
from rich.console import Console

from dase_grpc.errors import ConfigError, SchedulerError
from dase_grpc.launch.experiments.folder import ExperimentFolder
from dase_grpc.launch.experiments.queued import QueuedCells, states_beside
from dase_grpc.launch.experiments.scoreboard import Scoreboard
from dase_grpc.launch.experiments.slurm import Task


class Site:
    """A queue that is told what it has, an answer at a time; what happens meanwhile is done before it."""

    def __init__(self, root: Path) -> None:
        self.cells = small_cells(seed=[0, 1, 2])
        self.folder = ExperimentFolder(root / "e")
        self.console = Console(file=io.StringIO(), width=400)
        self.board = Scoreboard(self.console, self.cells, done=0, read=self.folder.reading)
        self.log = root / "log.out"
        self.answers = []
        self.stop = asyncio.Event()

    def task(self, cell, state: str = "RUNNING", *, job: str = "5_0") -> Task:
        return Task(job, state, cell.identity, self.log)

    def finish(self, cell, *, seconds: float = 2.0) -> None:
        trained(self.folder.path, cell)
        assert self.folder.finish(cell, seconds=seconds) is None

    def fail(self, cell) -> None:
        with self.folder.locks.one_cell(cell.name, print):
            self.folder.begin(cell)
            trained(self.folder.path, cell, step=50)
            self.folder.fail(cell, "exit code 1, the gear is stuck")

    def ask(self) -> dict[str, Task]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    async def follow(self, *answers) -> list[str]:
        """What is said until all has ended, with these answers in turn; nothing more may be asked."""
        self.answers += answers
        queued = QueuedCells(self.folder, self.board, self.ask, ask_every_s=0.0)
        async with asyncio.timeout(PATIENCE_S):
            await queued.follow(self.cells, self.stop)
        assert self.answers == []
        text = self.console.file.getvalue()
        return [line for line in text.splitlines() if " of 3 cells finished" not in line]


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


async def test_cells_start_when_their_task_does_and_end_with_their_files(site):
    first, second, third = site.cells

    def later() -> dict[str, Task]:
        site.finish(first)
        return {each.name: site.task(each) for each in (second, third)}

    def at_last() -> dict[str, Task]:
        site.finish(second, seconds=70.0)  # its task still ends
        site.finish(third)
        return {second.name: site.task(second, "COMPLETING")}

    waiting = {each.name: site.task(each, "PENDING") for each in site.cells}
    said = await site.follow(waiting | {first.name: site.task(first)}, later, at_last)
    assert said == [
        "seed-0: started",
        "seed-0: finished after 2 s, evaluation -1.5",
        "seed-1: started",
        "seed-2: started",
        "seed-1: finished after 1 min 10 s, evaluation -1.5",
        "seed-2: finished after 2 s, evaluation -1.5",
    ]
    assert {outcome.kind for outcome in site.board.outcomes.values()} == {"finished"}


async def test_a_task_that_is_gone_is_told_by_what_its_cell_has_left(site):
    first, second, third = site.cells
    site.log.write_text("slurmstepd: error: Detected 1 oom_kill event\n")
    site.finish(first)
    site.fail(second)
    queued = {second.name: site.task(second), third.name: site.task(third, job="5_2")}
    said = await site.follow(queued, {})
    assert [line for line in said if "failed" in line] == [
        "seed-1: failed after 0 s: exit code 1, the gear is stuck"
    ]
    assert said[-1] == (
        f"seed-2: stopped after 0 s: job 5_2 has ended, slurmstepd: error: Detected 1 oom_kill event; "
        f"its log is {site.log}"
    )
    assert [outcome.kind for outcome in site.board.outcomes.values()] == ["finished", "failed", "stopped"]


async def test_the_failure_of_an_earlier_try_is_none_while_the_cell_is_queued_again(site):
    first, *others = site.cells
    site.fail(first)
    for each in others:
        site.finish(each)

    def later() -> dict[str, Task]:
        with site.folder.locks.one_cell(first.name, print):
            site.folder.begin(first)
        site.finish(first)
        return {}

    said = await site.follow({first.name: site.task(first, "PENDING")}, later)
    assert said[-1] == "seed-0: finished after 2 s, evaluation -1.5"


async def test_a_queue_that_does_not_answer_ends_nothing_and_is_told_once(site):
    silent = SchedulerError("squeue does not answer: it is started anew")

    def later() -> dict[str, Task]:
        for each in site.cells:
            site.finish(each)
        return {}

    said = await site.follow(silent, silent, later)
    assert said[0] == "note: squeue does not answer: it is started anew; it is asked again every 0 s"
    assert sum(line.startswith("note:") for line in said) == 1
    assert {outcome.kind for outcome in site.board.outcomes.values()} == {"finished"}


async def test_a_signal_leaves_what_is_queued(site):
    def stopping() -> dict[str, Task]:
        site.stop.set()
        return {each.name: site.task(each) for each in site.cells}

    await site.follow(stopping)
    assert site.board.outcomes == {}


def test_cells_with_a_task_are_queued_and_their_files_are_not_looked_at(site):
    first, second, _ = site.cells
    site.finish(first)
    (site.folder.path / second.name).mkdir()
    (site.folder.path / second.name / "in-the-way").touch()
    states = states_beside(site.folder, site.cells, {second.name: site.task(second, "PENDING")})
    assert {name: state.kind for name, state in states.items()} == {
        "seed-0": "finished",
        "seed-1": "queued",
        "seed-2": "waiting",
    }
    assert states["seed-1"].text == "job 5_0 is pending"


def test_a_cell_that_is_queued_with_other_settings_is_refused(site):
    other = Task("5_0", "PENDING", "of-another", site.log)
    with pytest.raises(ConfigError) as refused:
        states_beside(site.folder, site.cells, {"seed-1": other})
    assert_one_sentence(refused.value, "cell seed-1 is queued with other settings as job 5_0", "scancel 5_0")
