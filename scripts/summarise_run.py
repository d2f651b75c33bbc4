"""Prints what docs/results says of a run, from the run's files, as Markdown tables.

Usage: python scripts/summarise_run.py RUN [--at 30000 50000 75000]
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dase_grpc.runs.curves import FINAL, around, final_score, returns
from dase_grpc.runs.directory import AgentDirectory, RunDirectory
from dase_grpc.runs.logs import read_evaluations, read_metrics


def returns_row(agent: AgentDirectory, at: Sequence[int], *, every: int) -> str:
    """One line of the table of returns."""
    curve = returns(read_evaluations(agent.evaluations.path))
    numbers = [around(curve, step, every=every) for step in at]
    numbers += [final_score(curve), float(curve.value[-1]), float(curve.value.max())]
    return f"| agent {agent.agent_id} | " + " | ".join(f"{number:,.0f}" for number in numbers) + " |"


def similarity_row(agent: AgentDirectory) -> str:
    """One line of the table of similarity: medians over the records."""
    records = read_metrics(agent.metrics.path)

    def known(key: str) -> list[Any]:
        return [record[key] for record in records if record.get(key) is not None]

    weights, spread, shift = (
        known("similarity_weight"),
        known("divergence_covariance"),
        known("divergence_mean"),
    )
    return (
        f"| agent {agent.agent_id} | {statistics.median(weights):.1e} | {max(weights):.1e} | "
        f"{statistics.median(spread):.1f} | {statistics.median(shift):.1f} |"
    )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--at", type=int, nargs="*", default=[30_000, 50_000, 75_000])
    options = parser.parse_args()
    run = RunDirectory.open(options.run)
    steps = " | ".join(f"{step // 1000}k" for step in options.at)
    print(f"| | {steps} | last {FINAL} | last | best |")
    print("|---" * (len(options.at) + 4) + "|")
    for agent in run.agents():
        print(returns_row(agent, options.at, every=run.config.eval.every))
    print("\n| | median λ | largest λ | median covariance term | median mean term |\n|---|---|---|---|---|")
    for agent in run.agents():
        print(similarity_row(agent))


if __name__ == "__main__":
    main()
