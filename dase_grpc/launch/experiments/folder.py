"""An experiment on disk: one run directory for each cell, what has become of it, and who may write there.

<cell>/                      the cell's run directory; `finished.json` in it says that it is complete
.experiment/lock, .experiment/cells.lock, .experiment/locks/                                     who runs what
.experiment/configs/         what each child is told        .experiment/logs/     what each child said
.experiment/failed/          why a cell failed              .experiment/set-aside/  runs that were begun
.experiment/slurm/           what was queued
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import tomli_w

from dase_grpc.config.texts import json_value
from dase_grpc.errors import RunDirectoryError
from dase_grpc.launch.experiments.locks import ExperimentLocks
from dase_grpc.launch.experiments.matrix import RunCell, identity
from dase_grpc.replay.buffer.directory import BUFFER
from dase_grpc.runs.curves import AgentFiles, final_score, returns, status
from dase_grpc.runs.directory import (
    IN_ROUNDS,
    RUN_FILE,
    AgentDirectory,
    RunDirectory,
    checkpoint_paths,
    first_difference,
    round_paths,
    versions,
)
from dase_grpc.runs.files import FolderLock, last_line, replace_file, utf8
from dase_grpc.runs.rewind import changed_versions

FINISHED_FILE: Final = "finished.json"
OWN_FOLDER: Final = ".experiment"


@dataclass(frozen=True)
class State:
    """What has become of a cell: never begun, begun and not finished, failed, or finished in `path`.

    It is queued where a job of a cluster is to run it, or does.
    """

    kind: Literal["waiting", "queued", "unfinished", "failed", "finished"]
    path: Path
    text: str = ""


@dataclass(frozen=True)
class Reading:
    """How far a running cell's slowest agent is, and the mean of the agents' latest returns."""

    step: int = 0
    latest_return: float | None = None


class ExperimentFolder:
    """The files of one experiment. Reading makes nothing; only the holder of the lock writes.

    A cell that finishes loses its buffer, the bulk of its files, unless `keep_buffers` is set.
    """

    def __init__(self, path: Path, *, keep_buffers: bool = False) -> None:
        self.path = path
        self._keep_buffers = keep_buffers
        self._own = path / OWN_FOLDER
        self.locks = ExperimentLocks(self._own)

    def run(self, cell: RunCell) -> Path:
        """The cell's run, whether it is there or not."""
        return self.path / cell.name

    def config(self, cell: RunCell) -> Path:
        """The file with the cell's configuration that its process reads."""
        return self._own / "configs" / f"{cell.name}.toml"

    def log(self, cell: RunCell) -> Path:
        """What the cell's latest process has said."""
        return self._own / "logs" / f"{cell.name}.log"

    @property
    def queue(self) -> Path:
        """Where it is kept what was given to a cluster's queue."""
        return self._own / "slurm"

    def states(self, cells: Sequence[RunCell]) -> dict[str, State]:
        """The state of each cell by its name.

        A finished run counts wherever in the folder it lies: names change with what an experiment varies.
        """
        try:
            finished = self._finished()
            return {cell.name: self._state(cell, finished.get(cell.identity)) for cell in cells}
        except OSError as error:
            raise RunDirectoryError(f"cannot read {self.path}: {error.strerror or error}") from None

    def resumable(self, cell: RunCell) -> int | None:
        """The step that an interrupted run of the cell can probably be resumed from.

        None where it is kept as far as it goes, and where it has to start over: nothing is kept, its process
        failed, or it was begun with another configuration or other versions, so that it would not come to
        the same end as one without a break.
        """
        step = self.kept_step(cell)
        return step if 0 < step < cell.config.train.steps else None

    def kept_step(self, cell: RunCell) -> int:
        """The step up to which a run of the cell is kept, its last one included; 0 where it starts over."""
        run = self._begun_run(cell)
        return 0 if run is None else _kept_step(run)

    def conclude(self, cell: RunCell) -> float | None:
        """Marks a run as `finish` does that came to its end without a mark; how long it trained, in seconds.

        So it was where whoever was to mark it, or its process, was killed after its last step. None where
        there is no such run, or its buffer is to stay and is not whole.

        Raises:
            RunDirectoryError: another process writes to the run, or the mark cannot be written.
        """
        run = self._begun_run(cell)
        if run is None or _begun(run.path) != "finished":
            return None
        if self._keep_buffers and cell.mode in IN_ROUNDS and _kept_step(run) < cell.config.train.steps:
            return None
        with contextlib.closing(FolderLock.acquire(run.path)):  # somebody may go on with it by hand
            seconds = max(AgentFiles.read(agent).seconds for agent in run.agents())
            return seconds if self.finish(cell, seconds=seconds) is None else None

    def times_resumed(self, cell: RunCell) -> int:
        """How often its run notes that it went on; a resumption that is refused is not noted."""
        try:
            return len(RunDirectory.open(self.run(cell)).run.get("resumed", []))
        except RunDirectoryError:
            return 0

    def begin(self, cell: RunCell) -> str | None:
        """Clears the way for a new try; a run that was begun is set aside, and a sentence says so."""
        with self._writing():
            set_aside = self._set_aside(cell)
            self._failure(cell).unlink(missing_ok=True)
            self.config(cell).parent.mkdir(exist_ok=True)
            replace_file(self.config(cell), tomli_w.dumps(cell.config.model_dump(mode="json")).encode())
        return f"{cell.name} starts over; what there was of it is in {set_aside}" if set_aside else None

    def fail(self, cell: RunCell, reason: str) -> None:
        """Notes why a cell failed, for the next time somebody looks."""
        with self._writing():
            self._failure(cell).parent.mkdir(exist_ok=True)
            replace_file(self._failure(cell), utf8(f"{reason}\n"))

    def finish(self, cell: RunCell, *, seconds: float) -> str | None:
        """Marks the cell's run as complete and lets its buffer go, or says why it is not complete."""
        run = RunDirectory.open(self.run(cell))
        if run.config != cell.config:
            return f"is a run of another configuration ({_difference(run, cell)})"
        found = _status(run)
        if found != "finished":
            return f"ended early, {found}"
        told = {
            "run_sha256": _checksum(run.path),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
        }
        with self._writing():
            replace_file(run.path / FINISHED_FILE, f"{json.dumps(told)}\n".encode())
        if not self._keep_buffers:
            shutil.rmtree(run.replay, ignore_errors=True)
        return None

    def ended(self, cell: RunCell) -> State | None:
        """How a cell ended that others run; None while it is neither finished nor failed.

        Both folders are listed, for what is not there NFS may remember for a while.
        """
        marks = ((self.run(cell), FINISHED_FILE), (self._failure(cell).parent, self._failure(cell).name))
        finished, failed = (name in _names_in(folder) for folder, name in marks)
        if finished:
            return State("finished", self.run(cell))
        return self._state(cell, None) if failed else None

    def took_s(self, cell: RunCell) -> float:
        """How long the process ran that finished a cell, in seconds."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            return float(json_value((self.run(cell) / FINISHED_FILE).read_text(encoding="utf-8"))["seconds"])
        return 0.0

    def reading(self, cell: RunCell) -> Reading:
        """How far a run in progress is; without reading run.toml, since this is asked every second."""
        folders = (self.run(cell) / "agents" / str(agent) for agent in range(cell.config.train.agents))
        steps, found = [], []
        for agent in map(AgentDirectory, folders):
            step, mean = _evaluation(agent)
            steps.append(max(step, _recorded_step(last_line(agent.metrics.path))))
            found += [] if mean is None else [mean]
        return Reading(min(steps), sum(found) / len(found) if found else None)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunDirectoryError(f"cannot write to {self.path}: {error.strerror or error}") from None

    def _begun_run(self, cell: RunCell) -> RunDirectory | None:
        """The run in the cell's folder, unless the cell has to start over whatever that run has kept."""
        path = self.run(cell)
        if self._failure(cell).is_file() or not (path / RUN_FILE).is_file():
            return None
        try:
            run = RunDirectory.open(path)
        except RunDirectoryError:
            return None
        same = run.config == cell.config and run.run.get("mode") == cell.mode
        return run if same and changed_versions(run.versions, versions()) is None else None

    def _failure(self, cell: RunCell) -> Path:
        return self._own / "failed" / f"{cell.name}.txt"

    def _set_aside(self, cell: RunCell) -> Path | None:
        run, log = self.run(cell), self.log(cell)
        if not run.is_dir() or not any(run.iterdir()):
            return None
        folder = self._own / "set-aside"
        folder.mkdir(exist_ok=True)
        number = 1
        while (target := folder / f"{cell.name}-{number}").exists():
            number += 1
        with contextlib.closing(FolderLock.acquire(run)):  # somebody may go on with it by hand
            if log.is_file():
                log.rename(target.with_name(f"{target.name}.log"))
            run.rename(target)
        return target

    def _finished(self) -> dict[str, Path]:
        """The runs with a mark, by what they are."""
        marks = sorted(self.path.glob(f"*/{FINISHED_FILE}"))
        runs = [RunDirectory.open(mark.parent) for mark in marks]
        return {identity(run.config, str(run.run.get("mode"))): run.path for run in runs}

    def _state(self, cell: RunCell, finished: Path | None) -> State:
        if finished is not None:
            _require_complete(finished)
            return State("finished", finished)
        path, failure = self.run(cell), self._failure(cell)
        if (path / FINISHED_FILE).exists():
            run = RunDirectory.open(path)
            raise RunDirectoryError(
                f"{path} is a finished run of another configuration ({_difference(run, cell)}); "
                f"give the experiment another name, or move that folder away"
            )
        begun = path.exists() and (not path.is_dir() or any(path.iterdir()))
        if begun and not (path / RUN_FILE).is_file():
            raise RunDirectoryError(f"{path} is in the way of a cell and is no run; move it away")
        if failure.is_file():
            return State("failed", path, failure.read_text(encoding="utf-8", errors="replace").strip())
        if begun:
            return State("unfinished", path, _begun(path))
        return State("waiting", path)


def score(path: Path) -> float | None:
    """The final score of a run: the mean over its agents of their last 10 evaluations; None without any."""
    agents = [AgentFiles.read(agent) for agent in RunDirectory.open(path).agents()]
    found = [final_score(returns(agent.evaluations)) for agent in agents if len(agent.evaluations)]
    return sum(found) / len(found) if found else None


def _names_in(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def _require_complete(path: Path) -> None:
    """Checks that a run with a mark is the one that was marked, and has lost nothing since."""
    try:
        marked = json_value((path / FINISHED_FILE).read_text(encoding="utf-8"))["run_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunDirectoryError(f"{path / FINISHED_FILE} is damaged; move {path} away") from None
    if marked != _checksum(path):
        raise RunDirectoryError(f"{path / RUN_FILE} has changed since the run finished; move {path} away")
    found = _status(RunDirectory.open(path))
    if found != "finished":
        raise RunDirectoryError(f"{path} is marked as finished and yet is {found}; move it away")


def _difference(run: RunDirectory, cell: RunCell) -> str:
    if run.config != cell.config:
        return first_difference(run.config, cell.config)
    return f"its mode is {run.run.get('mode')}, and {cell.mode} here"


def _status(run: RunDirectory) -> str:
    """How far a run came; "finished" only with the evaluation of every agent that its last step brings."""
    agents = {agent.agent_id: AgentFiles.read(agent) for agent in run.agents()}
    found = status(run, agents)
    for agent_id, files in agents.items():
        if found == "finished" and run.config.train.steps not in files.evaluations.step:
            return f"without an evaluation of agent {agent_id} at its last step"
    return found


def _kept_step(run: RunDirectory) -> int:
    """The step of the slowest agent that is kept with all that a run goes on from; 0 where nothing is."""
    if run.run.get("mode") in IN_ROUNDS:
        return max(round_paths(run.replay), default=0)
    if not (run.replay / BUFFER).is_file():
        return 0
    folders = [run.agent(agent_id).checkpoints for agent_id in range(run.config.train.agents)]
    return min(max(checkpoint_paths(folder), default=0) for folder in folders)


def _begun(path: Path) -> str:
    """How far a run came that is not finished, whatever state it is in."""
    try:
        return _status(RunDirectory.open(path))
    except RunDirectoryError as error:
        return str(error)


def _checksum(path: Path) -> str:
    return hashlib.sha256((path / RUN_FILE).read_bytes()).hexdigest()


def _recorded_step(line: str) -> int:
    try:
        return int(json_value(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return 0


def _evaluation(agent: AgentDirectory) -> tuple[int, float | None]:
    try:
        step, mean = last_line(agent.evaluations.path).split(",")[:2]
        return int(step), float(mean)
    except ValueError:
        return 0, None
