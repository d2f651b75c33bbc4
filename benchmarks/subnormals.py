"""What Adam's subnormal moments cost a trained agent, and that its weights are the same without them.

python benchmarks/subnormals.py [--quick] [--env ID ...] [--warmup 30000] [--turns 5]
                                [--results FILE.csv | --show FILE.csv]

A TD3 agent (networks 128-128, batches of 128, rates 1e-3) is trained twice in lockstep with the same seed:
once as it is, once with moments left to die away below 1.2e-38, as torch's Adam has them. After a warm-up
the two take turns of 1,000 steps of environment and update. At the end their weights have to be equal to
the bit.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Event
from typing import Final
from unittest.mock import patch

import torch
from measuring import (
    Entry,
    Figure,
    Round,
    answer,
    conditions,
    machine,
    markdown,
    median,
    ratios,
    take_turns,
    values,
)

from dase_grpc.config.resolve import resolve
from dase_grpc.launch.lockstep import LockstepRun, open_lockstep
from dase_grpc.learning.agents import optimiser
from dase_grpc.runs.directory import RunDirectory

WITHOUT, WITH = "subnormals as 0", "subnormals kept"
STEPS, SHARE = "steps/s", "subnormal moments, %"
TASKS: Final = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
TURN: Final = 1000
SMALLEST_NORMAL: Final = torch.finfo(torch.float32).tiny


@contextmanager
def training(env: str) -> Iterator[LockstepRun]:
    """One agent about to take its first step."""
    agent = {"hidden": [128, 128], "batch_size": 128, "actor_lr": 1e-3, "critic_lr": 1e-3}
    train = {"agents": 1, "steps": 1_000_000, "checkpoint_every": 1_000_000}
    config = resolve(
        {
            "env": {"id": env},
            "train": train,
            "agent": {**agent, "start_steps": 1000},
            "eval": {"every": 1_000_000},
            "replay": {"min_size": 1000},
        }
    )
    with tempfile.TemporaryDirectory(prefix="subnormals-") as folder:
        directory = RunDirectory.create(Path(folder), "run", config, mode="lockstep")
        with open_lockstep(config, directory) as run:
            run.begin(Event())
            yield run


def steps(run: LockstepRun, count: int, *, kept: bool) -> Round:
    """Takes so many steps, Adam's as torch has them where subnormal moments are kept."""
    with patch.object(optimiser, "subnormals_as_zero", nullcontext) if kept else nullcontext():
        began = time.perf_counter()
        for _ in range(count):
            run.step()
        return Round(count, time.perf_counter() - began, 0.0, 0.0)


def taking(run: LockstepRun, count: int, *, kept: bool) -> Callable[[float], Round]:
    """Takes so many steps a turn, however long they last."""
    return lambda _: steps(run, count, kept=kept)


def subnormal_share(run: LockstepRun) -> float:
    """How many of the moments are subnormal, in percent."""
    moments = [
        values for name, values in run.learners[0].parts.agent.state_dict().items() if ".exp_avg" in name
    ]
    subnormal = sum(int(((each != 0) & (each.abs() < SMALLEST_NORMAL)).sum()) for each in moments)
    return 100 * subnormal / sum(each.numel() for each in moments)


def require_equal_weights(env: str, *runs: LockstepRun) -> None:
    """Ends the script where weights of networks and targets differ."""
    ours, theirs = (run.learners[0].parts.agent.state_dict() for run in runs)
    differing = [
        name for name in ours if ".exp_avg" not in name and not torch.equal(ours[name], theirs[name])
    ]
    if differing:
        sys.exit(
            f"benchmarks/subnormals.py: {env}: weights differ without subnormals: {', '.join(differing)}"
        )


def measured(env: str, *, warmup: int, turns: int, turn: int) -> list[Figure]:
    """One environment."""
    with ExitStack() as stack:
        runs = {kept: stack.enter_context(training(env)) for kept in (True, False)}
        for kept, run in runs.items():
            steps(run, warmup, kept=kept)
        entries = [
            Entry(WITH if kept else WITHOUT, taking(run, turn, kept=kept)) for kept, run in runs.items()
        ]
        found = take_turns(entries, subject=env, what=STEPS, turns=turns, seconds=0)
        require_equal_weights(env, *runs.values())
        share = partial(Figure, machine(), found[-1].load, env, SHARE)
        return [
            *found,
            *(share(WITH if kept else WITHOUT, 0, subnormal_share(run), 0, 0) for kept, run in runs.items()),
        ]


def measure(given: argparse.Namespace) -> list[Figure]:
    """All environments."""
    turn = TURN
    if given.quick:
        given.env, given.warmup, given.turns, turn = ["Pendulum-v1"], 1100, 1, 10
    return [
        figure
        for env in given.env
        for figure in measured(env, warmup=given.warmup, turns=given.turns, turn=turn)
    ]


def tables(found: Sequence[Figure]) -> str:
    """A line for each environment, with the middle of the ratios by turns."""
    lines = []
    for env in dict.fromkeys(figure.subject for figure in found):
        kept, ours = (values(found, subject=env, what=STEPS, who=who) for who in (WITH, WITHOUT))
        share = median(values(found, subject=env, what=SHARE, who=WITH))
        faster = sorted(ratios(ours, kept))
        lines.append(
            [
                env,
                f"{share:.0f} %",
                f"{median(kept):,.0f}",
                f"{median(ours):,.0f}",
                f"{faster[len(faster) // 2]:.2f} ({faster[0]:.2f} to {faster[-1]:.2f})",
            ]
        )
    head = ["environment", "subnormal moments", "steps/s with them", "as 0", "times as fast"]
    return f"{conditions(found)}\n\n{markdown(head, lines)}"


def main() -> None:
    """Measures, or shows what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of Pendulum")
    parser.add_argument("--env", nargs="+", default=list(TASKS), metavar="ID")
    parser.add_argument("--warmup", type=int, default=30_000, metavar="N", help="steps before the first turn")
    parser.add_argument("--turns", type=int, default=5, metavar="N")
    answer(parser, measure, tables)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
