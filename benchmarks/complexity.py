"""What K agents cost beside one: memory, run time and processor time of four ways to run the same agents.

python benchmarks/complexity.py [--agents 2] [--algo td3,ddpg,sac] [--gpu 0] [--results FILE.csv]
python benchmarks/complexity.py --quick
python benchmarks/complexity.py --show FILE.csv

single: one agent in one process. lockstep: K agents in turn in one process (`dase train --lockstep`).
threads: K agents at once in one process, each on a thread, on one buffer behind a lock. processes: a
replay node, K learner nodes and their launcher (`dase train`).

Every agent does the same work: the paper's networks and batch, --warmup random steps, then --updates
steps with an update each. Every run is a process of its own; the variants take turns, and an increase
compares runs of the same turn, so that a busy machine slows all alike. How each figure is measured:
docs/results/complexity.md.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from complexity_table import NOTE, VARIANTS, Measured, as_row, read_results, results_file, table
from measuring import processor
from process_tree import (
    ProcessTree,
    Sample,
    busy_s_between,
    counted_once,
    cpu_s_between,
    longest_wait_s,
    peak,
)

from dase_grpc.config.algorithms import ALGORITHMS
from dase_grpc.config.presets import preset
from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.errors import DaseError
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_evaluations, read_metrics

WORKER: Final = Path(__file__).with_name("complexity_variants.py")
LAUNCHER: Final = "launcher"
MIB: Final = 2**20
SAMPLE_EVERY_S: Final = 0.25
RUN_LIMIT_S: Final = 900.0
SHOWN_LOG_LINES: Final = 40


@dataclass(frozen=True)
class Plan:
    """What each run does."""

    env: str
    agents: int
    warmup: int
    updates: int
    gpu: int | None = None

    def configuration(self, algorithm: str, variant: str, seed: int) -> RunConfig:
        """The run's configuration: the paper's, shortened, with evaluations of a single step."""
        steps = self.warmup + self.updates - 1  # the first update follows the last random step
        return resolve(
            preset(f"paper/{algorithm}"),
            {
                "env": {"id": self.env},
                "train": {
                    "agents": 1 if variant == "single" else self.agents,
                    "steps": steps,
                    "seed": seed,
                    "checkpoint_every": steps,
                    "threads": 1,
                },
                "agent": {"start_steps": self.warmup},
                "eval": {"every": steps, "episodes": 1, "max_episode_steps": 1},
                "replay": {"storage": "memory"},  # as it is in one process
            },
        )


# --- measuring --------------------------------------------------------------------------------------------


class RunFailedError(DaseError):
    """A run to be measured did not end as it should."""


@dataclass(frozen=True)
class Watched:
    """A process that has ended, and how it was seen."""

    started_at: float
    samples: list[Sample]
    cpu_total_s: float


def measure(plan: Plan, *, algorithm: str, variant: str, repeat: int, memory: bool = True) -> Measured:
    """Runs a variant and measures it; without its memory, which takes time to look at, that is 0.

    Raises:
        RunFailedError: it failed, or its agents did other work than planned.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="complexity-") as folder:
        root = Path(folder)
        config = plan.configuration(algorithm, variant, seed=repeat)
        directory = RunDirectory.create(root, "run", config, mode=variant)
        command = [sys.executable, str(WORKER), variant, str(directory.path)]
        if plan.gpu is not None:
            command += [f"--gpu={plan.gpu}", f"--gpu-notes={root}"]
        seen = watch(command, log=root / "log", memory=memory)
        _require_work(directory, plan)
        times = training_times(directory)
        highest = peak(seen.samples)
        allocated, reserved = gpu_memory_mib(root, plan)
    agents, slowest = config.train.agents, max(times.values(), key=lambda time: time.seconds)
    busy_s = busy_s_between(seen.samples, slowest.begun_at, slowest.ended_at)
    own_s = sum(cpu_s_in(seen.samples, dict.fromkeys(times, slowest)).values())
    return Measured(
        algorithm=algorithm,
        variant=variant,
        repeat=repeat,
        agents=agents,
        steps=agents * config.train.steps,
        updates=agents * plan.updates,
        run_s=slowest.seconds,
        core_wait_s=core_wait_s(seen.samples, times),
        startup_s=max(time.begun_at for time in times.values()) - seen.started_at,
        cpu_s=sum(cpu_s_in(seen.samples, times).values()),
        cpu_total_s=seen.cpu_total_s,
        ram_mib=counted_once(highest.memory.values()) / MIB,
        pss_mib=max(sum(each.pss for each in sample.memory.values()) for sample in seen.samples) / MIB,
        rss_mib=max(sum(each.rss for each in sample.memory.values()) for sample in seen.samples) / MIB,
        gpu_allocated_mib=allocated,
        gpu_reserved_mib=reserved,
        at_peak=breakdown(highest),
        others_cores=(busy_s - own_s) / slowest.seconds,
        load=load,
    )


def watch(command: Sequence[str], *, log: Path, memory: bool = True) -> Watched:
    """Runs a process to its end and samples its tree meanwhile; output goes to `log`.

    Raises:
        RunFailedError: it failed or took longer than RUN_LIMIT_S.
    """
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    before, started_at = _children_cpu_s(), time.time()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**os.environ, **limits}
        )
        try:
            tree = ProcessTree(process.pid, clock=time.time, name=process_name, memory=memory)
            samples = [tree.sample()]
            while not _ends(process, within_s=SAMPLE_EVERY_S):
                samples.append(tree.sample())
                if time.time() - started_at > RUN_LIMIT_S:
                    raise RunFailedError(f"{command[2]} did not end within {RUN_LIMIT_S:g} s")
        finally:
            if process.poll() is None:
                process.kill()  # its nodes end by themselves: their leash closes
                process.wait()
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:])
        raise RunFailedError(f"{command[2]} ended with exit code {process.returncode}:\n{tail}")
    return Watched(started_at, samples, _children_cpu_s() - before)


def _ends(process: "subprocess.Popen[bytes]", *, within_s: float) -> bool:
    try:
        process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def process_name(command: Sequence[str]) -> str:
    """What a process of a run is called: replay, learner-0, ..., or launcher."""
    options = dict(part.partition("=")[::2] for part in command if part.startswith("--"))
    role = options.get("--role", LAUNCHER)
    return f"{role}-{options['--agent']}" if "--agent" in options else role


@dataclass(frozen=True)
class Training:
    """When an agent took its first step, and when it had taken its last; Unix time."""

    begun_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_at - self.begun_at


def training_times(directory: RunDirectory) -> dict[str, Training]:
    """When each agent trained, by the name that its process has if it has one of its own.

    Known from the journals: the last line of an agent's evaluations is written after its last step, says
    how long ago its training began, and the first line says how much of that was the evaluation before.
    """
    times = {}
    for agent in directory.agents():
        ended_at = agent.evaluations.path.stat().st_mtime
        wall = read_evaluations(agent.evaluations.path).wall_seconds
        times[f"learner-{agent.agent_id}"] = Training(ended_at - float(wall[-1] - wall[0]), ended_at)
    return times


def cpu_s_in(samples: Sequence[Sample], times: Mapping[str, Training]) -> dict[str, float]:
    """Processor seconds by process: of a learner node while it trains, of others while any agent does."""
    whole = Training(
        min(time.begun_at for time in times.values()), max(time.ended_at for time in times.values())
    )
    within = {process: times.get(process, whole) for process in samples[-1].cpu_s}
    return {
        process: cpu_s_between(samples, process, time.begun_at, time.ended_at)
        for process, time in within.items()
    }


def core_wait_s(samples: Sequence[Sample], times: Mapping[str, Training]) -> float:
    """How long the agent that took longest was ready to run and had no core."""
    name, slowest = max(times.items(), key=lambda item: item[1].seconds)
    process = name if name in samples[-1].cpu_s else LAUNCHER
    return longest_wait_s(samples, process, slowest.begun_at, slowest.ended_at)


def _require_work(directory: RunDirectory, plan: Plan) -> None:
    steps, agents = directory.config.train.steps, directory.config.train.agents
    found = [read_metrics(agent.metrics.path)[-1] for agent in directory.agents()]
    done = [(int(last["step"]), int(last["updates"])) for last in found]
    if done != [(steps, plan.updates)] * agents:
        raise RunFailedError(
            f"the agents did {done} steps and updates instead of {steps} and {plan.updates} each"
        )


def gpu_memory_mib(folder: Path, plan: Plan) -> tuple[float | None, float | None]:
    """The most memory that torch allocated and reserved on a GPU, summed over processes; None without one.

    Raises:
        RunFailedError: a GPU was asked for and no process has used it.
    """
    if plan.gpu is None:
        return None, None
    notes = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not notes:
        raise RunFailedError(f"no process has used GPU {plan.gpu}")
    allocated, reserved = (sum(note[key] for note in notes) / MIB for key in ("allocated", "reserved"))
    return allocated, reserved


def breakdown(sample: Sample) -> str:
    """The own and the mapped memory of each process, in MiB, as `name own+mapped`."""
    parts = (
        f"{name} {memory.own / MIB:.0f}+{memory.mapped / MIB:.0f}" for name, memory in sample.memory.items()
    )
    return "; ".join(sorted(parts))


def measure_all(plan: Plan, algorithms: Sequence[str], *, repeats: int) -> Iterator[Measured]:
    """Every variant of every algorithm, in turns that begin with another variant each time."""
    warm = Plan(plan.env, plan.agents, warmup=20, updates=20, gpu=plan.gpu)
    for variant in VARIANTS:  # reads every file once, so that no measured run waits for the disk
        measure(warm, algorithm=algorithms[0], variant=variant, repeat=0)
    for repeat in range(repeats):
        for algorithm in algorithms:
            first = repeat % len(VARIANTS)
            for variant in (*VARIANTS[first:], *VARIANTS[:first]):
                yield measure(plan, algorithm=algorithm, variant=variant, repeat=repeat)


# --- command line -------------------------------------------------------------------------------------------


def machine() -> str:
    """The processor, its cores, and the versions that decide the figures."""
    return (
        f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {version('torch')}, grpcio {version('grpcio')}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--algo", default=",".join(ALGORITHMS), help="separated by commas")
    parser.add_argument("--agents", type=int, default=2, help="K")
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--warmup", type=int, default=1_000, help="random steps of each agent")
    parser.add_argument("--updates", type=int, default=1_000, help="updates of each agent")
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    parser.add_argument("--quick", action="store_true", help="one turn of 100 updates")
    parser.add_argument("--gpu", type=int, help="CUDA device of all agents; left out, the CPU")
    parser.add_argument("--results", type=Path, metavar="FILE.csv", help="one line for each run")
    parser.add_argument("--show", type=Path, metavar="FILE.csv", help="print the table of earlier results")
    given = parser.parse_args()
    if given.quick:
        given.updates, given.repeats = 100, 1
    for option in ("agents", "warmup", "updates", "repeats"):
        if getattr(given, option) < 1:
            parser.error(f"--{option} must be at least 1")
    unknown = [name for name in given.algo.split(",") if name not in ALGORITHMS]
    if unknown:
        parser.error(f"--algo {unknown[0]!r} is none of {', '.join(ALGORITHMS)}")
    return given


def main() -> None:
    """Measures and prints the table."""
    given = _arguments()
    try:
        runs = read_results(given.show) if given.show else _measure_and_keep(given)
    except DaseError as error:
        sys.exit(str(error))
    loads, others = [run.load for run in runs], [run.others_cores for run in runs]
    print(
        f"\nload average {min(loads):.1f} to {max(loads):.1f}; other work took "
        f"{min(others):.2f} to {max(others):.2f} cores; medians, ranges in brackets\n"
    )
    print(table(runs))
    print(f"\n{NOTE}")


def _measure_and_keep(given: argparse.Namespace) -> list[Measured]:
    plan = Plan(given.env, given.agents, given.warmup, given.updates, given.gpu)
    print(f"{machine()}\n{plan}, {given.repeats} turns")
    runs = []
    with results_file(given.results) as file:
        for run in measure_all(plan, given.algo.split(","), repeats=given.repeats):
            runs.append(run)
            if file is not None:
                file.writerow(as_row(run))
            print(
                f"{run.algorithm:5} {run.variant:10} turn {run.repeat + 1}: {run.run_s:5.1f} s, "
                f"{run.unhindered_s:.1f} s less waits, "
                f"{run.ram_mib:5.0f} MiB ({run.at_peak})",
                file=sys.stderr,
            )
    return runs


if __name__ == "__main__":
    main()
