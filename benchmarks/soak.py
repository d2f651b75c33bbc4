"""Trains for a long time and looks for whatever grows: memory, descriptors, threads, streams, queues.

A durable replay and light learners on Pendulum, as `dase drill` starts them. Every few seconds each process
is looked at: resident memory, and the anonymous part of it (the replay's buffer is file-backed and counts
only in the whole), file descriptors and threads, the replay's open streams, the learners' transitions that
are not acknowledged. Each look is a line of --csv. The slopes are least squares over the looks that came
after the warm-up and after every slot of the buffer's file had been written once, for until then the
replay's memory grows with it; their errors are those of independent residuals. Something
has grown where slope - 3 errors is above a limit (1 MiB an hour, one descriptor, thread or stream an hour,
100 queued transitions an hour); the exit code is then 1.

Usage: python benchmarks/soak.py --csv FILE [--minutes 60] [--learners 4] [--warm-up 900] [--every 5]
       python benchmarks/soak.py --csv FILE --report [--warm-up 900]
"""

import argparse
import asyncio
import csv
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dase_grpc.config.resolve import resolve
from dase_grpc.launch.drill.cluster import DrillCluster, open_cluster, read_metrics
from dase_grpc.launch.drill.drill import drill_config
from dase_grpc.replay.buffer.directory import stored_identity

SETTINGS: Final = {
    "env": {"id": "Pendulum-v1"},
    "agent": {"hidden": [32, 32], "batch_size": 64, "start_steps": 100},
    "replay": {"capacity": 20_000, "min_size": 100},
}
MEASURED: Final = ("rss_mib", "anonymous_mib", "descriptors", "threads", "streams", "queued")
LIMITS: Final = dict(zip(MEASURED, (1.0, 1.0, 1.0, 1.0, 1.0, 100.0), strict=True))
"""What may come on top in an hour."""

FIELDS: Final = ("seconds", "process", "passes", *MEASURED, "thread_names")
ERRORS: Final = 3.0
FEWEST: Final = 10
"""Looks that a slope needs at least."""


@dataclass(frozen=True)
class Slope:
    """How much more of something there is an hour later, the error of that, and the first and last level."""

    per_hour: float
    error: float
    first: float
    last: float


def slope_of(seconds: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> Slope:
    """Least squares; the error is that of independent residuals. Levels are medians of the outer quarters."""
    hours = (seconds - seconds.mean()) / 3_600
    spread = float(hours @ hours)
    per_hour = float(hours @ values) / spread
    residuals = values - values.mean() - per_hour * hours
    error = float(np.sqrt(residuals @ residuals / (len(values) - 2) / spread))
    quarter = max(1, len(values) // 4)
    return Slope(per_hour, error, float(np.median(values[:quarter])), float(np.median(values[-quarter:])))


def look(pid: int) -> dict[str, float | str]:
    """What the kernel says of a process, the names of its threads included, each with its number."""
    process = Path("/proc") / str(pid)
    names = Counter(_thread_names(process))
    told = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return {
        "rss_mib": int(told["VmRSS"].split()[0]) / 1_024,
        "anonymous_mib": int(told["RssAnon"].split()[0]) / 1_024,
        "threads": float(told["Threads"]),
        "descriptors": float(len(list((process / "fd").iterdir()))),
        "thread_names": ", ".join(f"{names[name]} {name}" for name in sorted(names)),
    }


def _thread_names(process: Path) -> Iterator[str]:
    for thread in process.glob("task/*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            yield thread.read_text().strip()


def slots_of(data_dir: Path) -> int:
    """How many transitions the files of a buffer have room for."""
    identity = stored_identity(data_dir)
    if identity is None:
        raise SystemExit(f"{data_dir} holds no buffer")
    return identity.slots


def looks(cluster: DrillCluster) -> Iterator[tuple[str, dict[str, float | str]]]:
    """One look at each process, by its name; without those that do not answer this time."""
    if cluster.replay is None:
        raise ValueError("the cluster has no replay")
    if not (served := read_metrics(cluster.replay_metrics_port)):
        return
    passes = served["dase_replay_inserted_transitions_total"] / slots_of(cluster.data_dir)
    streams = {"streams": served["dase_replay_active_streams"], "queued": 0.0}
    yield "replay", {"passes": passes, **look(cluster.replay.process.pid), **streams}
    for agent_id, learner in cluster.learners.items():
        if told := read_metrics(learner.metrics_port):
            queued = {"streams": 0.0, "queued": told["dase_explorer_unacknowledged_transitions"]}
            yield f"learner {agent_id}", {"passes": passes, **look(learner.node.process.pid), **queued}


async def soak(options: argparse.Namespace, folder: Path) -> None:
    """Trains and looks until the time is over; the learners then leave in order."""
    train = {"agents": options.learners, "seed": options.seed}
    config = drill_config(resolve(SETTINGS, {"train": train}), folder)
    with options.csv.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, FIELDS, lineterminator="\n")
        lines.writeheader()
        async with open_cluster(config, folder) as cluster:
            began = time.monotonic()
            while (seconds := time.monotonic() - began) < 60 * options.minutes:
                for process, found in await asyncio.to_thread(lambda: list(looks(cluster))):
                    values = {
                        key: round(value, 2) if isinstance(value, float) else value
                        for key, value in found.items()
                    }
                    lines.writerow({"seconds": round(seconds, 1), "process": process, **values})
                file.flush()
                await asyncio.sleep(options.every)
            await cluster.until_training(cluster.agents)
            await cluster.stop()


def report(path: Path, *, warm_up_s: float) -> Iterator[tuple[str, bool]]:
    """The lines of a table of slopes, each with whether it shows growth."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    written_s = min((float(line["seconds"]) for line in lines if float(line["passes"]) >= 1), default=np.inf)
    from_s = max(warm_up_s, written_s)
    yield f"from {from_s:.0f} s on (every slot of the buffer had been written after {written_s:.0f} s)", False
    yield "| process | what | first | last | slope an hour | error | grows |", False
    yield "|---|---|---|---|---|---|---|", False
    for process in dict.fromkeys(line["process"] for line in lines):
        own = [line for line in lines if line["process"] == process and float(line["seconds"]) >= from_s]
        if len(own) < FEWEST:
            raise SystemExit(f"{len(own)} looks at {process} after the warm-up are too few; run longer")
        seconds = np.array([float(line["seconds"]) for line in own])
        for what in MEASURED:
            if what == ("queued" if process == "replay" else "streams"):
                continue
            found = slope_of(seconds, np.array([float(line[what]) for line in own]))
            grows = found.per_hour - ERRORS * found.error > LIMITS[what]
            cells = (process, what, *(f"{value:.2f}" for value in (found.first, found.last)))
            slope = (f"{found.per_hour:+.2f}", f"{found.error:.2f}", "YES" if grows else "no")
            yield f"| {' | '.join((*cells, *slope))} |", grows
        quarter = max(1, len(own) // 4)
        before, after = (
            _usual([line.get("thread_names", "") for line in part])
            for part in (own[:quarter], own[-quarter:])
        )
        if before != after:
            yield f"{process}'s threads were {before}, and are {after}", False


def _usual(names: list[str]) -> str:
    return Counter(names).most_common(1)[0][0]


def main() -> None:
    """Soaks, or only reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--warm-up", type=float, default=900.0, help="seconds that do not count")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="only print what the file says")
    options = parser.parse_args()
    if not options.report:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(soak(options, Path(folder) / "cluster"))
    grown = False
    for line, grows in report(options.csv, warm_up_s=options.warm_up):
        print(line)
        grown |= grows
    print("something grows" if grown else "nothing grows")
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
