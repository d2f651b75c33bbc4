"""What a run needs, by observation width and K: memory, network and cores of replay and learners, and shards.

python scripts/sizing.py [--updates 79] [--capacity 1000000]      prints the tables of docs/sizing.md

Rows are exact, from TransitionSchema. What the replay's processor does for a batch and for a message of rows
is from docs/results/throughput.md, what a learner takes from docs/results/complexity.csv, both measured. A
learner makes one update for each environment step, of 256 transitions. Each transition counts as a message
of its own and each batch as one, though several may share one: cores and shards are upper bounds.
"""

import argparse
import csv
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from dase_grpc.config.sections import PolicyConfig
from dase_grpc.replay.client.handoff import USUAL
from dase_grpc.replay.service.cluster import BEATS_PER_S
from dase_grpc.schema import TransitionSchema

RESULTS: Final = Path(__file__).parents[1] / "docs" / "results"
TASKS: Final = (
    ("Pendulum", 3, 1),
    ("HalfCheetah", 17, 6),
    ("Humanoid", 348, 17),
    ("1,000 numbers", 1_000, 20),
)
AGENTS: Final = (2, 8, 32, 128, 1_000)
BATCH: Final = 256
HIDDEN: Final = 256
MEASURED_WIDTHS: Final = {"narrow": (17, 6), "wide": (348, 17)}
BUSY: Final = 0.7
"""How much of a core a shard should take at most; what is left is for bursts."""

MIB, GB = 2**20, 10**9


@dataclass(frozen=True)
class Costs:
    """What was measured: seconds of a replay's core, and a learner's memory and updates a second of a core.

    A batch costs `batch_s` and each of its bytes `byte_s`; a message of rows costs `message_s`.
    """

    batch_s: float
    byte_s: float
    message_s: float
    learner_mib: float
    learner_rate: float


@dataclass(frozen=True)
class Load:
    """What K learners, each of so many updates a second, bring upon the replay in a second."""

    row_bytes: int
    agents: int
    updates: float
    costs: Costs

    @property
    def in_bytes(self) -> float:
        """Rows."""
        return self.agents * self.updates * self.row_bytes

    @property
    def out_bytes(self) -> float:
        """Batches."""
        return self.in_bytes * BATCH

    @property
    def batch_s(self) -> float:
        """Of a core, for one batch."""
        return self.costs.batch_s + self.costs.byte_s * BATCH * self.row_bytes

    @property
    def cores(self) -> float:
        """Of the replay."""
        return self.agents * self.updates * (self.batch_s + self.costs.message_s)

    @property
    def shards(self) -> int:
        """Replay processes, each on one core that is not too busy."""
        return int(-(-self.cores // BUSY)) or 1


def schema(observation: int, action: int) -> TransitionSchema:
    """A transition of such a task."""
    return TransitionSchema("sizing", observation, action, (-1.0,) * action, (1.0,) * action)


def read_costs(results: Path) -> Costs:
    """The measured pieces, from the files of results.

    Raises:
        ValueError: they do not hold what they should.
    """
    batches: dict[str, float] = {}
    messages: list[float] = []
    task = ""
    for line in (results / "throughput.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5:
            continue
        task = next((name for name in MEASURED_WIDTHS if cells[0].startswith(name)), task)
        if task and cells[1].startswith(f"batches of {BATCH} out"):
            batches.setdefault(task, float(cells[4]) / 1e6)
        elif task and re.search(r"chunks of 16$", cells[1]):
            messages.append(16 * float(cells[4]) / 1e6)
    if set(batches) != set(MEASURED_WIDTHS) or not messages:
        raise ValueError(f"{results / 'throughput.md'} has no table as benchmarks/replay.py prints it")
    sizes = {name: BATCH * schema(*width).row_bytes for name, width in MEASURED_WIDTHS.items()}
    byte_s = (batches["wide"] - batches["narrow"]) / (sizes["wide"] - sizes["narrow"])
    with (results / "complexity.csv").open(newline="", encoding="utf-8") as file:
        single = [
            row for row in csv.DictReader(file) if (row["algorithm"], row["variant"]) == ("td3", "single")
        ]
    return Costs(
        batches["narrow"] - byte_s * sizes["narrow"],
        byte_s,
        statistics.mean(messages),
        statistics.median(float(row["ram_mib"]) for row in single),
        statistics.median(int(row["updates"]) / float(row["run_s"]) for row in single),
    )


def policy_bytes(observation: int, action: int) -> int:
    """Of an actor with two hidden layers."""
    widths = (observation, HIDDEN, HIDDEN, action)
    return 4 * sum(a * b + b for a, b in pairwise(widths))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def report(costs: Costs, updates: float, capacity: int) -> Iterator[str]:
    """The lines of the page's tables."""
    yield (
        f"Measured pieces: a batch takes {costs.batch_s * 1e6:.0f} µs of a replay's core and "
        f"{costs.byte_s * 1e9:.2f} ns for each of its bytes, a message of rows {costs.message_s * 1e6:.0f} "
        f"µs; a learner {costs.learner_mib:.0f} MiB, and it makes {costs.learner_rate:.0f} updates a second "
        f"on one core (TD3, HalfCheetah)."
    )
    yield ""
    rows = []
    for name, observation, action in TASKS:
        row_bytes = schema(observation, action).row_bytes
        one = Load(row_bytes, 1, updates, costs)
        alone = f"{BUSY / one.cores:,.0f}"
        rows.append(
            [
                f"{name} ({observation}, {action})",
                f"{row_bytes:,}",
                f"{capacity * row_bytes / MIB:,.0f}",
                f"{one.out_bytes * 8 / 1e6:,.1f}",
                f"{one.in_bytes * 8 / 1e6:,.3f}",
                f"{one.cores:.4f}",
                alone,
            ]
        )
    yield from table(
        (
            "task (observation, action)",
            "row, bytes",
            f"buffer of {capacity:,}, MiB",
            "Mbit/s to a learner",
            "from it",
            "replay cores for it",
            "learners a shard",
        ),
        rows,
    )
    yield ""
    rows = [
        [
            f"{agents:,}",
            *(
                f"{load.out_bytes * 8 / GB:,.2f} / {load.cores:,.2f} / {load.shards:,}"
                for _, observation, action in TASKS
                for load in (Load(schema(observation, action).row_bytes, agents, updates, costs),)
            ),
            f"{agents * costs.learner_mib / 1024:,.1f}",
            f"{agents * max(1.0, updates / costs.learner_rate):,.0f}",
        ]
        for agents in AGENTS
    ]
    heads = ("K", *(name for name, _, _ in TASKS), "learners' RAM, GiB", "learners' cores")
    yield from table(heads, rows)
    yield ""
    yield from thousand(costs, updates)


def thousand(costs: Costs, updates: float) -> Iterator[str]:
    """The arithmetic of 1,000 learners of HalfCheetah."""
    agents, (_, observation, action) = AGENTS[-1], TASKS[1]
    load = Load(schema(observation, action).row_bytes, agents, updates, costs)
    every = PolicyConfig().publish_every
    policy = policy_bytes(observation, action)
    published = agents * updates / every * policy
    total, gbit = agents * updates, load.out_bytes / GB * 8
    each = f"{agents:,} x {updates:g}/s"
    yield from table(
        ("1,000 learners of HalfCheetah", "how", "is"),
        (
            (
                "out of the replay",
                f"{each} x {BATCH} x {load.row_bytes} B",
                f"{load.out_bytes / GB:.2f} GB/s",
            ),
            ("into it", f"{each} x {load.row_bytes} B", f"{load.in_bytes / 1e6:.1f} MB/s"),
            ("cores for batches", f"{each} x {load.batch_s * 1e6:.0f} µs", f"{total * load.batch_s:.1f}"),
            ("cores for rows", f"{each} x {costs.message_s * 1e6:.0f} µs", f"{total * costs.message_s:.1f}"),
            ("shards", f"{load.cores:.1f} cores / {BUSY}", f"{load.shards}"),
            ("a shard's link", f"{gbit:.1f} Gbit/s / {load.shards}", f"{gbit / load.shards:.2f} Gbit/s"),
            (
                "heartbeats, to each shard",
                f"{agents:,} / {USUAL.beat_s:g} s, or {BEATS_PER_S} as it asks for",
                f"{min(agents / USUAL.beat_s, BEATS_PER_S):,.0f}/s",
            ),
            ("a policy", f"two layers of {HIDDEN}, float32", f"{policy / 1e3:.0f} kB"),
            (
                "policies, if all are followed",
                f"{each} / {every} x {policy / 1e3:.0f} kB",
                f"{published / 1e6:.0f} MB/s",
            ),
            (
                "learners' memory",
                f"{agents:,} x {costs.learner_mib:.0f} MiB",
                f"{agents * costs.learner_mib / 1024:.0f} GiB",
            ),
        ),
    )


def main() -> None:
    """Prints."""
    costs = read_costs(RESULTS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--updates", type=float, help="a second, of each learner; else what was measured")
    parser.add_argument("--capacity", type=int, default=1_000_000, help="of the buffer, in transitions")
    options = parser.parse_args()
    print("\n".join(report(costs, options.updates or round(costs.learner_rate), options.capacity)))


if __name__ == "__main__":
    main()
