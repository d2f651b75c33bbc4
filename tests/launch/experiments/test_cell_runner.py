"""Cells as processes: how many at a time, in which order, how they fail, how they are stopped."""

import asyncio
import io
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from children import lives
from launch.experiment_cases import small_cells, trained
from patience import PATIENCE_S
from rich.console import Console

from dase_grpc.errors import DISK_FULL_CODE
from dase_grpc.launch.experiments.folder import OWN_FOLDER, ExperimentFolder, Reading
from dase_grpc.launch.experiments.runner import CellRunner, last_words
from dase_grpc.launch.experiments.scoreboard import Scoreboard
from dase_grpc.runs.checkpoint import save_checkpoint

FAKE = Path(__file__).with_name("fake_train.py")


class Bench:
    """A runner of fake trainings, and what can be seen of them."""

    def __init__(self, root: Path, cells, *, jobs: int) -> None:
        self.pids = root / "pids"
        self.pids.mkdir()
        self.folder = ExperimentFolder(root / "e")
        (root / "e" / OWN_FOLDER).mkdir(parents=True)
        self.cells = cells
        self.console = Console(file=io.StringIO(), width=300)
        self.board = Scoreboard(self.console, cells, done=0, read=lambda cell: Reading())
        self.stop = asyncio.Event()
        self.lock = os.open(root, os.O_RDONLY)
        self.runner = CellRunner(
            self.folder,
            self.board,
            jobs=jobs,
            locks=(self.lock,),
            program=(sys.executable, "-S", str(FAKE), str(self.pids)),
        )

    @asynccontextmanager
    async def running(self):
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.runner.run(self.cells, self.stop))
            yield
        assert self.alive() == set()

    def alive(self) -> set[str]:
        return {path.stem for path in self.pids.glob("*.pid") if lives(int(path.read_text()))}

    async def until_alive(self, *names: str) -> None:
        while self.alive() != set(names):  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.005)

    def end(self, cell, *, code: int = 0, finished: bool = True) -> None:
        """Lets a cell's process end, with or without everything that a finished run has."""
        if finished:
            trained(self.folder.path, cell)
        staged = self.pids / f"{cell.name}.going"
        staged.write_text(str(code))
        staged.rename(self.pids / f"{cell.name}.go")

    def arguments(self, cell) -> list[str]:
        return (self.pids / f"{cell.name}.args").read_text().splitlines()

    def kinds(self) -> dict[str, str]:
        return {name: outcome.kind for name, outcome in self.board.outcomes.items()}


@pytest.fixture
def bench(tmp_path):
    benches = []

    def make(cells, *, jobs):
        benches.append(Bench(tmp_path, cells, jobs=jobs))
        return benches[-1]

    yield make
    for each in benches:
        os.close(each.lock)


@pytest.fixture
def alone(bench):
    """One cell that has a runner to itself."""
    made = bench(small_cells(), jobs=1)
    return made, made.cells[0]


async def test_never_more_run_than_there_are_cores_and_the_next_starts_when_one_ends(bench):
    bench = bench(small_cells(seed=[0, 1, 2, 3]), jobs=2)
    async with bench.running():
        await bench.until_alive("seed-0", "seed-1")
        bench.end(bench.cells[1])
        await bench.until_alive("seed-0", "seed-2")
        bench.end(bench.cells[0])
        bench.end(bench.cells[2])
        await bench.until_alive("seed-3")
        bench.end(bench.cells[3])
    assert bench.kinds() == dict.fromkeys(["seed-0", "seed-1", "seed-2", "seed-3"], "finished")
    assert {state.kind for state in bench.folder.states(bench.cells).values()} == {"finished"}


async def test_a_cell_that_needs_all_cores_is_not_passed_by(bench):
    bench = bench(small_cells(mode="cluster", train__agents=[1, 5, 2]), jobs=3)
    async with bench.running():
        await bench.until_alive("agents-1")  # two of three cores: the next one waits, and behind it the last
        bench.end(bench.cells[0])
        await bench.until_alive("agents-5")
        bench.end(bench.cells[1])
        await bench.until_alive("agents-2")
        bench.end(bench.cells[2])
    assert set(bench.kinds().values()) == {"finished"}


async def test_a_child_is_told_its_cell_its_threads_and_to_end_with_its_parent(bench):
    bench = bench(small_cells(settings={"train.threads": 3}), jobs=4)
    (cell,) = bench.cells
    async with bench.running():
        await bench.until_alive("run")
        bench.end(cell)
    assert bench.arguments(cell) == [
        *("train", "--stdin-is-leash", f"--config={bench.folder.config(cell)}"),
        *(f"--runs={bench.folder.path}", "--name=run", "--lockstep", "3"),
    ]


async def test_a_cell_that_fails_is_noted_with_its_last_words_and_the_others_go_on(bench):
    bench = bench(small_cells(seed=[0, 1]), jobs=1)
    failing, other = bench.cells
    async with bench.running():
        await bench.until_alive("seed-0")
        bench.end(failing, code=7, finished=False)
        await bench.until_alive("seed-1")
        bench.end(other)
    assert bench.kinds() == {"seed-0": "failed", "seed-1": "finished"}
    reason = f"exit code 7, seed-0 has something to say; its log is {bench.folder.log(failing)}"
    assert bench.board.outcomes["seed-0"].text == reason
    state = bench.folder.states(bench.cells)["seed-0"]
    assert (state.kind, state.text) == ("failed", reason)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (70, "ended early, stopped at step 70 of 120; its log is"),
        (None, "is not a run: it has no run.toml; its log is"),
    ],
)
async def test_a_cell_that_ends_well_and_early_or_leaves_nothing_has_failed(alone, step, said):
    bench, cell = alone
    async with bench.running():
        await bench.until_alive("run")
        if step is not None:
            trained(bench.folder.path, cell, step=step)
        bench.end(cell, finished=False)
    assert said in bench.board.outcomes["run"].text


async def test_a_stop_ends_what_runs_and_starts_nothing_more(bench):
    bench = bench(small_cells(seed=[0, 1, 2]), jobs=2)
    async with bench.running():
        await bench.until_alive("seed-0", "seed-1")
        bench.stop.set()
    assert bench.kinds() == {"seed-0": "stopped", "seed-1": "stopped"}
    assert "stopping: the running cells keep their checkpoints" in bench.console.file.getvalue()
    assert not (bench.pids / "seed-2.pid").exists()


def half_finished(bench, cell, *, step: int = 60):
    """What a run that was interrupted leaves: a round, and the log of its process."""
    run = trained(bench.folder.path, cell, step=step)
    run.replay.mkdir()
    (run.replay / f"round-{step:09d}.json").touch()
    bench.folder.log(cell).parent.mkdir(exist_ok=True)
    bench.folder.log(cell).write_text("the first try\n")
    return run


async def test_a_cell_that_was_interrupted_is_resumed(alone):
    bench, cell = alone
    run = half_finished(bench, cell)
    async with bench.running():
        await bench.until_alive("run")
        for agent in run.agents():
            agent.evaluations.append(step=120, return_mean=0.0, return_std=0.0, episodes=2, wall_seconds=2.0)
            agent.metrics.append({"step": 120})
            save_checkpoint(agent.checkpoints, step=120, tensors={}, metadata={})
        bench.end(cell, finished=False)
    assert bench.arguments(cell) == ["resume", "--stdin-is-leash", str(run.path), "1"]
    assert bench.kinds() == {"run": "finished"}, bench.console.file.getvalue()
    assert "run goes on from step 60" in bench.console.file.getvalue()
    assert bench.folder.log(cell).read_text().startswith("the first try\nrun has something")
    assert not (bench.folder.path / OWN_FOLDER / "set-aside").exists()


@pytest.mark.parametrize("kept", [0, 60, 120])
async def test_a_cell_at_its_last_step_that_nobody_marked_counts_without_another_try(alone, kept):
    """Its process, or whoever watched it, was killed after its last checkpoint."""
    bench, cell = alone
    bench.runner.program = ("/no/such/program",)
    run = trained(bench.folder.path, cell)
    if kept:
        run.replay.mkdir()
        (run.replay / f"round-{kept:09d}.json").touch()
    async with bench.running():
        pass
    assert bench.kinds() == {"run": "finished"}, bench.console.file.getvalue()
    assert bench.folder.states(bench.cells)["run"].kind == "finished"
    assert bench.folder.took_s(cell) == bench.board.outcomes["run"].seconds == 1.0
    assert f"missing: dase report {run.path}" in bench.console.file.getvalue()
    assert not (bench.folder.path / OWN_FOLDER / "set-aside").exists()


async def test_a_cell_whose_resumption_is_refused_starts_over_at_once(alone):
    bench, cell = alone
    half_finished(bench, cell)
    async with bench.running():
        await bench.until_alive("run")
        (bench.pids / "run.pid").unlink()
        bench.end(cell, code=2, finished=False)
        await bench.until_alive("run")
        bench.end(cell)
    assert bench.arguments(cell)[0] == "train"
    assert bench.kinds() == {"run": "finished"}
    said = bench.console.file.getvalue()
    assert "run cannot be resumed: exit code 2, run has something to say; its log is" in said
    assert "run starts over; what there was of it is in" in said
    (aside,) = (bench.folder.path / OWN_FOLDER / "set-aside").glob("*.log")
    assert aside.read_text().startswith("the first try\n")


@pytest.mark.parametrize(
    ("code", "begun", "goes_on"),
    [(2, True, True), (DISK_FULL_CODE, True, False), (DISK_FULL_CODE, False, False), (-9, True, False)],
    ids=["refused once it has gone on", "disk full before it goes on", "disk full at first", "killed"],
)
async def test_a_cell_that_may_go_on_later_has_failed_for_now_and_does_not_start_over(
    alone, code, begun, goes_on
):
    bench, cell = alone
    run = half_finished(bench, cell) if begun else None
    async with bench.running():
        await bench.until_alive("run")
        run = run or half_finished(bench, cell)
        if goes_on:
            run.resumed(run.config, from_steps=[60, 60], command=())
        bench.end(cell, code=code, finished=False)
    assert bench.arguments(cell)[0] == ("resume" if begun else "train")
    assert bench.kinds() == {"run": "failed"}
    assert bench.folder.states(bench.cells)["run"].kind == "unfinished"
    assert bench.folder.resumable(cell) == 60
    assert not (bench.folder.path / OWN_FOLDER / "set-aside").exists()


async def test_a_program_that_is_not_there_fails_its_cells(bench):
    bench = bench(small_cells(seed=[0, 1]), jobs=2)
    bench.runner.program = ("/no/such/program",)
    async with bench.running():
        pass
    assert set(bench.kinds().values()) == {"failed"}
    assert "no process could be started: No such file" in bench.board.outcomes["seed-0"].text


async def test_a_cell_whose_log_and_run_are_gone_fails_alone(bench):
    bench = bench(small_cells(seed=[0, 1]), jobs=1)
    failing, other = bench.cells
    async with bench.running():
        await bench.until_alive("seed-0")
        bench.folder.log(failing).unlink()
        bench.end(failing, code=1, finished=False)
        await bench.until_alive("seed-1")
        bench.end(other)
    assert bench.kinds() == {"seed-0": "failed", "seed-1": "finished"}
    assert "its log cannot be read (No such file or directory)" in bench.board.outcomes["seed-0"].text


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("starting\nerror: it is full\n", "error: it is full"),
        ("error: replay ended; the end of its log:\nreplay | joined\n", "error: replay ended; the end of "),
        ("error: replay ended; the end of its log:\nreplay | joined\n", "of its log: replay | joined"),
        ("Traceback\nValueError: x\n\n", "ValueError: x"),
        ("", "its log is empty"),
    ],
)
def test_the_last_words_are_the_error_and_what_follows_it(tmp_path, log, words):
    (tmp_path / "log").write_text(log)
    assert words in last_words(tmp_path / "log")
