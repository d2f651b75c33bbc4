"""A Slurm's queue: cells are given to it as one job array, and it is asked which of them it still has.

What was queued is noted before it is: a folder for each submission, whose job has a name of its own by which
Slurm is asked. So whoever comes next, on whatever host, knows of a job although its submitter was killed.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dase_grpc.errors import ConfigError, RunDirectoryError, SchedulerError
from dase_grpc.launch.experiments.matrix import RunCell
from dase_grpc.launch.experiments.schedulers import last_line, told
from dase_grpc.launch.experiments.sites import OTHER_CLUSTER, SlurmSite
from dase_grpc.launch.experiments.task import CellTask
from dase_grpc.runs.files import json_text, read_document, replace_file, require_seal, sealed, written

SUBMISSION_FILE: Final = "submission.json"
ENDLESS: Final = 1_000_000
"""How often submitit may queue a task again: as often as its cell gets on."""

_ELSEWHERE: Final = ("SBATCH_CLUSTERS", "SBATCH_CLUSTER_CONSTRAINT")
"""What to sbatch counts more than the flags in a job's script, and to squeue nothing."""


@dataclass(frozen=True)
class Task:
    """A task of an array that Slurm still has: it waits, runs or ends. `log` is what it says."""

    job: str
    state: str
    identity: str
    log: Path

    @property
    def runs(self) -> bool:
        """Whether its processes have been started and have not ended."""
        return self.state in ("RUNNING", "SUSPENDED", "STOPPED", "COMPLETING")


@dataclass(frozen=True)
class SlurmQueue:
    """The jobs of one experiment, whose submissions are noted below `folder`."""

    folder: Path

    def tasks(self) -> dict[str, Task]:
        """What Slurm still has of the experiment, by the cells' names.

        Raises:
            SchedulerError: it does not answer, or not so that it can be understood.
            RunDirectoryError: a note of what was queued is damaged.
        """
        noted = dict(map(_read_submission, sorted(self.folder.glob(f"*/{SUBMISSION_FILE}"))))
        if not noted:
            return {}
        asked = ("squeue", "--noheader", "--array", f"--name={','.join(noted)}", "--format=%j|%F|%K|%T")
        found: dict[str, Task] = {}
        for line in _told(*asked).splitlines():
            cell, task = self._task(line.strip(), noted)
            if cell not in found or not found[cell].runs:
                found[cell] = task
        return found

    def _task(self, line: str, noted: Mapping[str, Sequence[tuple[str, str]]]) -> tuple[str, Task]:
        """The cell and the task in one of squeue's lines."""
        try:
            name, job, index, state = line.split("|")
            alone = not index.isdecimal()  # one cell is no array
            cell, identity = noted[name][0 if alone else int(index)]
        except (ValueError, LookupError):
            raise SchedulerError(
                f"squeue prints {line!r}, which is none of the tasks that it was asked for"
            ) from None
        job = job if alone else f"{job}_{index}"
        return cell, Task(job, state, identity, self.folder / name.rpartition("-")[2] / f"{job}_0_log.out")

    def submit(
        self, file: Path, cells: Sequence[RunCell], site: SlurmSite, *, name: str, command: Sequence[str]
    ) -> str:
        """Queues a task for each cell, in order; the job's name.

        `command` is `dase`, `file` what the experiment's file is, which may change afterwards, and `name` the
        experiment's.

        Raises:
            ConfigError: submitit is not installed.
            SchedulerError: Slurm refuses the job, of which then nothing is left.
        """
        token = secrets.token_hex(4)
        folder = (self.folder / token).absolute()
        job_name = f"{re.sub(r'[^A-Za-z0-9_.+]+', '_', name)}-{token}"
        noted = {"job_name": job_name, "cells": [[cell.name, cell.identity] for cell in cells]}
        copy = folder / f"{name}.toml"
        with written(folder):
            folder.mkdir(parents=True)
            shutil.copyfile(file, copy)
            replace_file(folder / SUBMISSION_FILE, json_text(sealed(noted)).encode())
        root = self.folder.absolute().parents[2]
        task = CellTask(
            (*command, "experiment", str(copy), f"--runs={root}", *_gpu(site, cells)), str(Path.cwd())
        )
        try:
            _submit(folder, task, cells, {**_parameters(site, cells), "job_name": job_name})
        except SchedulerError:
            if _knows_no(job_name):  # it may have taken the job, and not got round to saying so
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return job_name


def require_slurm() -> None:
    """Checks that there is what submits jobs, and what asks for them, and that both mean the same jobs."""
    for name in _ELSEWHERE:
        if os.environ.get(name):
            raise ConfigError(f"{name} is to be unset for --on slurm, {OTHER_CLUSTER}")
    if os.environ.get("SBATCH_JOB_NAME"):
        raise ConfigError(
            "SBATCH_JOB_NAME is to be unset for --on slurm, which finds jobs by names of its own"
        )
    missing = [name for name in ("sbatch", "srun", "squeue") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"--on slurm finds no {', '.join(missing)} in the PATH; run it on a login node of the cluster"
        )
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise ConfigError('--on slurm needs submitit, so run: pip install "dase-grpc[slurm]"') from None


def _gpu(site: SlurmSite, cells: Sequence[RunCell]) -> Iterator[str]:
    if (flag := site.gpu_flag(cells[0].mode)) is not None:
        yield f"--gpu={flag}"


def _parameters(site: SlurmSite, cells: Sequence[RunCell]) -> Mapping[str, Any]:
    """What submitit is told of a task; all tasks of an array are given the same."""
    return {
        "partition": site.partition,
        "time": site.time_minutes,
        "signal_delay_s": site.stop_s,
        "array_parallelism": site.at_once,
        "cpus_per_task": site.cpus or max(cell.weight for cell in cells),
        "mem": f"{site.memory_mib}M",
        "gpus_per_node": site.gpus or None,
        "setup": list(site.setup) or None,
        "stderr_to_stdout": True,
        "wckey": None,
        "additional_parameters": {"requeue": True, **site.sbatch},
    }


def _submit(folder: Path, task: CellTask, cells: Sequence[RunCell], parameters: Mapping[str, Any]) -> None:
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = submitit.SlurmExecutor(folder, max_num_timeout=ENDLESS)
    executor.update_parameters(**parameters)
    try:
        executor.map_array(task, [cell.name for cell in cells])
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        raise SchedulerError(
            f"Slurm refuses the job: {last_line(str(error))}; see [slurm] in the file"
        ) from None


def _knows_no(job_name: str) -> bool:
    """Whether Slurm says that it has no job of a name."""
    try:
        return not _told("squeue", "--noheader", f"--name={job_name}", "--format=%j").strip()
    except SchedulerError:
        return False


def _read_submission(path: Path) -> tuple[str, list[tuple[str, str]]]:
    """The job's name, and the names and identities of its cells by their index in the array."""
    document = read_document(path)
    require_seal(document, str(path))
    try:
        return str(document["job_name"]), [(str(name), str(known)) for name, known in document["cells"]]
    except (KeyError, TypeError, ValueError):
        raise RunDirectoryError(f"{path} is damaged; see what is queued, and delete its folder") from None


def _told(*command: str) -> str:
    """What a command of Slurm's prints, whatever somebody would have it leave out by SQUEUE_..."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    return told(command, asked=command[0], variables=plain)
