"""Measures what a checkpoint of a lockstep run costs, and how long a resume reads, with a full buffer.

python benchmarks/checkpoints.py [--env HalfCheetah-v5] [--capacity 1000000] [--every 10000]

Two TD3 agents with the paper's networks; the buffer's rows are random numbers. Prints processor time and
time on the clock, and bytes written.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import numpy as np

from dase_grpc.config.presets import preset
from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.launch.lockstep import LockstepRun, open_lockstep
from dase_grpc.replay.buffer.ring import RingBuffer
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.rounds import newest_whole_round, read_rows

ROUNDS, CHUNK = 5, 100_000


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the processor and of the clock."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return time.process_time() - processor, time.perf_counter() - clock


def fill(run: LockstepRun, count: int, rng: np.random.Generator) -> None:
    """Adds random transitions of both agents."""
    ring = run.store.ring
    for start in range(0, count, CHUNK):
        rows = rng.standard_normal((min(CHUNK, count - start), ring.schema.width), np.float32)
        ring.schema.agent_ids(rows)[:] = np.arange(len(rows)) % 2
        ring.append(rows)


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def keep_agents(run: LockstepRun) -> None:
    """Keeps both agents' checkpoints, of the next step."""
    for learner in run.learners:
        learner.step()
        learner.keep()


def say(what: str, times: list[tuple[float, float]], megabytes: float) -> None:
    """Prints one line: the medians."""
    processor, clock = np.median(np.array(times), axis=0)
    print(f"{what}: {megabytes:.1f} MB, {1e3 * processor:.0f} ms of processor, {1e3 * clock:.0f} ms in all")


def measure(config: RunConfig, directory: RunDirectory, *, every: int) -> None:
    """Prints what checkpoints and resuming cost."""
    rng = np.random.default_rng(0)
    with open_lockstep(config, directory) as run:
        for learner in run.learners:
            learner.begin(Event())
        ring = run.store.ring
        fill(run, ring.capacity, rng)
        keep_agents(run)
        first = [timed(run.keep_round)]
        say(f"the first {len(ring):,} transitions", first, size(directory.replay) / 1e6)
        agents, rounds = [], []
        for _ in range(ROUNDS):
            fill(run, 2 * every, rng)
            agents.append(timed(lambda: keep_agents(run)))
            before = {path.name for path in directory.replay.iterdir()}
            rounds.append(timed(run.keep_round))
            added = [path for path in directory.replay.iterdir() if path.name not in before]
        kept = max((directory.agent(0).checkpoints).iterdir())
        say("checkpoints of two agents", agents, 2 * size(kept) / 1e6)
        say(f"{2 * every:,} new transitions", rounds, sum(path.stat().st_size for path in added) / 1e6)
        print(f"on disk: {size(directory.path) / 1e6:.1f} MB")

    def read() -> None:
        whole = newest_whole_round(directory).round
        restored = RingBuffer(ring.schema, ring.capacity)
        restored.take_over(read_rows(directory.replay, whole.segments, first=whole.first), first=whole.first)

    say("checked and read by a resume", [timed(read)], size(directory.replay) / 1e6)


def main() -> None:
    """Runs the measurement in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=10_000, help="environment steps between checkpoints")
    given = parser.parse_args()
    config = resolve(
        preset("paper/td3"),
        {
            "env": {"id": given.env},
            "train": {"agents": 2},
            "replay": {"capacity": given.capacity},
            "eval": {"episodes": 1, "max_episode_steps": 1},
        },
    )
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        directory = RunDirectory.create(Path(folder), "run", config, mode="lockstep")
        measure(config, directory, every=given.every)


if __name__ == "__main__":
    main()
