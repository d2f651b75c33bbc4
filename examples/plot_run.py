"""Draws the learning curves of one or more runs from their files, and shows how to read those.

Usage: python examples/plot_run.py RUN [RUN ...] --out curves.png
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from dase_grpc.runs.curves import returns, smoothed
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_evaluations


def draw(runs: list[RunDirectory]) -> Figure:
    """One panel per run: every evaluation faint, the moving average over 25 strong."""
    figure = Figure(figsize=(7.5, 3.2 * len(runs)), layout="constrained")
    for run, axis in zip(runs, figure.subplots(len(runs), 1, squeeze=False)[:, 0], strict=True):
        for agent in run.agents():
            curve = returns(read_evaluations(agent.evaluations.path))
            line = axis.plot(curve.step, smoothed(curve.value), label=f"agent {agent.agent_id}")[0]
            axis.plot(curve.step, curve.value, color=line.get_color(), alpha=0.3)
        axis.set_title(f"{run.config.env.id}, {run.config.train.agents} agents, seed {run.config.train.seed}")
        axis.set_xlabel("environment steps of each agent")
        axis.set_ylabel(f"mean return of {run.config.eval.episodes} episodes")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    return figure


def main() -> None:
    """Draws what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    options = parser.parse_args()
    draw([RunDirectory.open(path) for path in options.runs]).savefig(options.out, dpi=120)
    print(options.out)


if __name__ == "__main__":
    main()
