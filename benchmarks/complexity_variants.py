"""One training run in one of the ways that complexity.py compares; started by it as a process of its own.

python benchmarks/complexity_variants.py VARIANT RUN_DIR [--gpu N] [--gpu-notes FOLDER]

single, lockstep: what `dase train --lockstep` runs. processes: what `dase train` runs, from this process.
threads: the same learners, each on a thread of this process, on one buffer behind a lock; there is no such
way to run DASE but this, it is here to be compared with.
"""

import argparse
import asyncio
import atexit
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from rich.console import Console

from dase_grpc.config.gpus import Gpus
from dase_grpc.errors import DaseError
from dase_grpc.launch.checks import check
from dase_grpc.launch.display import make_display
from dase_grpc.launch.local import LocalCluster, run_cluster
from dase_grpc.launch.supervision import Supervisor
from dase_grpc.runs.directory import RunDirectory

if TYPE_CHECKING:  # torch takes seconds and memory, which the launcher of `processes` does not spend
    from dase_grpc.learning.training.learner import Learner
    from dase_grpc.replay.buffer.store import ReplayStore

P = ParamSpec("P")
T = TypeVar("T")

AS_DASE: Final = "--as-dase"


def run_lockstep_variant(directory: RunDirectory, gpu: int | None, notes: Path | None) -> None:
    """Trains all agents of the run round-robin."""
    from dase_grpc.launch.lockstep import open_lockstep, run_lockstep

    with open_lockstep(directory.config, directory, gpu=gpu) as run:
        run_lockstep(run, Event(), lambda: None)
    write_gpu_note(notes)


def run_threads(directory: RunDirectory, gpu: int | None, notes: Path | None) -> None:
    """Trains all agents of the run at once, each on a thread, on one buffer behind a lock.

    Raises:
        DivergedError: of the first agent whose networks diverge; the others are told to stop.
        Exception: whatever the environment or an agent raises.
    """
    import torch

    from dase_grpc.launch.lockstep import open_lockstep

    halt = Event()

    def train(learner: "Learner") -> None:
        torch.set_num_threads(directory.config.train.threads)  # OpenMP keeps the number for each thread
        try:
            learner.train(halt)
        finally:
            if not learner.done:
                halt.set()

    with (
        open_lockstep(directory.config, directory, gpu=gpu) as run,
        ThreadPoolExecutor(len(run.learners)) as pool,
    ):
        let_threads_take_turns(run.store)
        for ended in [pool.submit(train, learner) for learner in run.learners]:
            ended.result()
    write_gpu_note(notes)


def let_threads_take_turns(store: "ReplayStore") -> None:
    """Makes the threads of this process use a buffer one at a time."""
    lock = threading.Lock()
    for name in ("append", "sample"):
        setattr(store, name, _one_at_a_time(getattr(store, name), lock))


def _one_at_a_time(call: Callable[P, T], lock: threading.Lock) -> Callable[P, T]:
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return call(*args, **kwargs)

    return waiting


def run_processes(directory: RunDirectory, gpu: int | None, notes: Path | None) -> None:
    """Trains with a replay node and a learner node for each agent.

    Raises:
        NodeFailedError: a node ended before its time.
    """
    program = (sys.executable, "-m", "dase_grpc")
    if notes is not None:
        program = (sys.executable, str(Path(__file__)), f"{AS_DASE}={notes}")

    async def run() -> None:
        cluster = LocalCluster(
            directory.config,
            directory,
            Supervisor(directory, print),
            gpus=() if gpu is None else (gpu,),
            program=program,
        )
        display = make_display(Console(quiet=True), directory.config)
        await run_cluster(cluster, stop=asyncio.Event(), display=display, say=print)

    asyncio.run(run())


VARIANTS: Final[Mapping[str, Callable[[RunDirectory, int | None, Path | None], None]]] = {
    "single": run_lockstep_variant,
    "lockstep": run_lockstep_variant,
    "threads": run_threads,
    "processes": run_processes,
}


def write_gpu_note(folder: Path | None) -> None:
    """Notes the most bytes that torch's allocator held on the GPU in this process, if it held any."""
    torch = sys.modules.get("torch")
    if folder is None or torch is None or not torch.cuda.is_initialized():
        return
    devices = range(torch.cuda.device_count())
    note = {
        "allocated": sum(torch.cuda.max_memory_allocated(device) for device in devices),
        "reserved": sum(torch.cuda.max_memory_reserved(device) for device in devices),
    }
    (folder / f"{os.getpid()}.json").write_text(json.dumps(note), encoding="utf-8")


def as_dase(notes: Path) -> None:
    """Is the program `dase`, but for a note on the GPU's memory at its end."""
    from dase_grpc.__main__ import run

    atexit.register(write_gpu_note, notes)
    run()


def main() -> None:
    """Runs one variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("variant", choices=tuple(VARIANTS))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--gpu", type=int)
    parser.add_argument("--gpu-notes", type=Path)
    given = parser.parse_args()
    try:
        directory = RunDirectory.open(given.run_dir)
        gpus = None if given.gpu is None else Gpus((given.gpu,))
        check(directory.config, gpus=gpus)  # as `dase train` does, at the same cost
        VARIANTS[given.variant](directory, given.gpu, given.gpu_notes)
    except DaseError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith(AS_DASE):
        as_dase(Path(sys.argv.pop(1).partition("=")[2]))
    main()
