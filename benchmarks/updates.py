"""Measures one update and one action of each algorithm with the paper's settings, on one CPU thread.

python benchmarks/updates.py [--observation 17] [--action 6] [--seconds 5] [--compare-guard]

Microseconds of processor time, the median over rounds in which the algorithms take turns, so that a
busy machine slows all alike. --compare-guard measures each algorithm's update also without the check
that leaves out steps which are not finite, and prints the median of the rounds' ratios.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dase_grpc.config.algorithms import ALGORITHMS
from dase_grpc.config.presets import preset
from dase_grpc.config.resolve import resolve
from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.optimiser import GuardedSteps
from dase_grpc.learning.agents.registry import as_actor_critic, make_agent
from dase_grpc.schema import TransitionSchema

UPDATES, ACTIONS = 20, 200


def microseconds(call: Callable[[], object], times: int) -> float:
    """Processor time of one call."""
    started = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - started) / times * 1e6


class UnguardedSteps(GuardedSteps):
    """An optimiser that takes every step."""

    def step(self, loss: Tensor, *, skip: Tensor | None = None) -> None:
        """One gradient step."""
        self._adam(self._found)


def compare_guard(
    make: Callable[[str], ActorCritic], batch: Batch, weight: Tensor, *, seconds: float
) -> None:
    """Prints what the check costs, for each algorithm."""
    for name in ALGORITHMS:
        guarded, plain = make(name), make(name)
        plain._actor_steps = UnguardedSteps(plain.flats["actor"], lr=plain.config.actor_lr)
        plain._critic_steps = UnguardedSteps(plain.flats["critic"], lr=plain.config.critic_lr)
        pairs: list[tuple[float, float]] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            order = (guarded, plain) if len(pairs) % 2 else (plain, guarded)
            took = {each: microseconds(partial(each.update, batch, weight), 4) for each in order}
            pairs.append((took[guarded], took[plain]))
        with_guard, without = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(first / second for first, second in pairs)
        print(
            f"{name:5} update {with_guard:6.0f} µs guarded, {without:6.0f} µs not, ratio {ratio:.4f} "
            f"(median of {len(pairs)})"
        )


def main() -> None:
    """Prints one line per algorithm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--observation", type=int, default=17)
    parser.add_argument("--action", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5, help="per algorithm")
    parser.add_argument("--compare-guard", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)

    n = given.action
    schema = TransitionSchema("Benchmark-v0", given.observation, n, (-1.0,) * n, (1.0,) * n)
    generator = torch.Generator().manual_seed(0)
    batch = Batch.from_rows(schema, torch.randn(256, schema.width, generator=generator))
    weight = torch.rand(256, generator=generator)

    def make(name: str) -> ActorCritic:
        config = resolve(preset(f"paper/{name}")).agent
        agent = make_agent(config, schema, seed=0, agent_id=0, device=torch.device("cpu"))
        return as_actor_critic(agent, use="this benchmark")

    if given.compare_guard:
        compare_guard(make, batch, weight, seconds=given.seconds)
        return
    observation = np.ones((1, given.observation), np.float32)
    agents = {name: make(name) for name in ALGORITHMS}
    update: dict[str, list[float]] = {name: [] for name in agents}
    act: dict[str, list[float]] = {name: [] for name in agents}
    end = time.perf_counter() + given.seconds * len(agents)
    while time.perf_counter() < end:
        for name, agent in agents.items():
            update[name].append(microseconds(partial(agent.update, batch, weight), UPDATES))
            act[name].append(microseconds(partial(agent.act, observation), ACTIONS))
    for name in agents:
        print(
            f"{name:5} update {statistics.median(update[name]):6.0f} µs (best {min(update[name]):.0f})   "
            f"act {statistics.median(act[name]):5.1f} µs (best {min(act[name]):.1f})"
        )


if __name__ == "__main__":
    main()
