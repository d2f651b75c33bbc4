"""How long training takes to go on after learners were killed, frozen or cut off, again and again.

A durable replay and two light learners on Pendulum, with what `dase drill` does to a cluster (its code is
used), many times over. Freezes outlast the lease; half of the frozen learners are replaced meanwhile and
fenced off when they wake, the others go on. Partitions, drawn between --shortest and --longest seconds, are
cuts and black holes, of one learner and of all. At the end the buffer has to hold each transition that was
stored once, whole and in order, and all that were acknowledged. Each outcome becomes a line of --csv, which
is added to, so that parts may run one by one or side by side; --table prints the table of what it holds.

Usage: python benchmarks/recovery.py --csv FILE [--kills 50] [--freezes 20] [--partitions 20]
       python benchmarks/recovery.py --csv FILE --table
"""

import argparse
import asyncio
import csv
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.launch.drill.drill import DrillOptions, drill_config, run_drill, sentence
from dase_grpc.launch.drill.faults import BEYOND_TTL_S, Fault, FaultOutcome

SETTINGS = {
    "env": {"id": "Pendulum-v1"},
    "train": {"agents": 2},
    "agent": {"hidden": [32, 32], "batch_size": 64, "start_steps": 100},
    "replay": {"capacity": "256MiB", "min_size": 100},
}
FIELDS = ("kind", "agents", "lasted_s", "recovered_s", "clock_from", "note")
CHECKED = "buffer checked"
HEADER = ("fault", "times", "recovered", "median", "worst", "counted from")


def faults(options: argparse.Namespace, config: RunConfig) -> list[Fault]:
    """All that is to happen, in an order of its own."""
    rng = random.Random(options.seed)
    agents = tuple(range(config.train.agents))
    plan = [Fault("learner killed", (agents[index % len(agents)],)) for index in range(options.kills)]
    for index in range(options.freezes):
        kind = "frozen, replaced" if index % 2 == 0 else "frozen, woken"
        plan.append(Fault(kind, (rng.choice(agents),), BEYOND_TTL_S + rng.uniform(0.0, 5.0)))
    for index in range(options.partitions):
        kind = "cut" if index % 2 == 0 else "black hole"
        hit = agents if index % 4 < 2 else (rng.choice(agents),)
        plan.append(Fault(kind, hit, rng.uniform(options.shortest, options.longest)))
    rng.shuffle(plan)
    return plan


def add_line(path: Path, values: Sequence[str]) -> None:
    """Adds a line to a CSV file, which gets its header first."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(FIELDS)
        writer.writerow(values)


def line_of(outcome: FaultOutcome) -> list[str]:
    """An outcome as a line of the file."""
    recovered = "" if outcome.recovered_s is None else f"{outcome.recovered_s:.2f}"
    agents = "+".join(map(str, outcome.agents))
    note = outcome.note.splitlines()[0] if outcome.note else ""
    return [outcome.kind, agents, f"{outcome.lasted_s:.2f}", recovered, outcome.clock_from, note]


def table_of(path: Path) -> Iterator[str]:
    """The lines of a Markdown table of recovery times, by fault."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["kind"] != CHECKED]
    yield f"| {' | '.join(HEADER)} |"
    yield "|---" * len(HEADER) + "|"
    for kind in dict.fromkeys(line["kind"] for line in lines):
        own = [line for line in lines if line["kind"] == kind]
        times = [float(line["recovered_s"]) for line in own if line["recovered_s"]]
        median, worst = (f"{of(times):.1f} s" if times else "" for of in (statistics.median, max))
        cells = (kind, str(len(own)), str(len(times)), median, worst, own[0]["clock_from"])
        yield f"| {' | '.join(cells)} |"


async def run(options: argparse.Namespace, folder: Path) -> bool:
    """Runs all faults; whether training went on after each, with nothing lost."""
    config = drill_config(resolve(SETTINGS, {"train": {"seed": options.seed}}), folder)

    def tell(outcome: FaultOutcome) -> None:
        add_line(options.csv, line_of(outcome))
        print(sentence(outcome), flush=True)

    result = await run_drill(DrillOptions(config, seed=options.seed), folder, faults(options, config), tell)
    for problem in result.problems or []:
        print(f"problem: {problem}")
    found = "nothing lost, doubled or torn" if result.problems == [] else f"problems: {result.problems}"
    note = f"{result.transitions} transitions of {result.processes} learner processes; {found}"
    add_line(options.csv, [CHECKED, "", "", "", "", note])
    print(note)
    return result.good


def main() -> None:
    """Runs what is asked for, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--freezes", type=int, default=20)
    parser.add_argument("--partitions", type=int, default=20)
    parser.add_argument("--shortest", type=float, default=1.0)
    parser.add_argument("--longest", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="only print the table of what the file holds")
    options = parser.parse_args()
    good = True
    if not options.table:
        with tempfile.TemporaryDirectory() as folder:
            good = asyncio.run(run(options, Path(folder) / "cluster"))
    print("\n".join(table_of(options.csv)))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
