"""Measures one update and one action of each algorithm with the paper's settings, on one CPU thread.

python benchmarks/updates.py [--observation 17] [--action 6] [--seconds 5]

Microseconds of processor time, the median over rounds in which the algorithms take turns, so that a
busy machine slows all alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from dase_grpc.agent_config import ALGORITHMS
from dase_grpc.config import resolve
from dase_grpc.learning.agent import Agent
from dase_grpc.learning.agents import make_agent
from dase_grpc.learning.batch import Batch
from dase_grpc.presets import preset
from dase_grpc.schema import TransitionSchema

UPDATES, ACTIONS = 20, 200


def microseconds(call: Callable[[], object], times: int) -> float:
    """Processor time of one call."""
    started = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - started) / times * 1e6


def main() -> None:
    """Prints one line per algorithm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--observation", type=int, default=17)
    parser.add_argument("--action", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5, help="per algorithm")
    given = parser.parse_args()
    torch.set_num_threads(1)

    n = given.action
    schema = TransitionSchema("Benchmark-v0", given.observation, n, (-1.0,) * n, (1.0,) * n)
    generator = torch.Generator().manual_seed(0)
    batch = Batch.from_rows(schema, torch.randn(256, schema.width, generator=generator))
    weight = torch.rand(256, generator=generator)
    observation = np.ones((1, given.observation), np.float32)
    agents: dict[str, Agent] = {
        name: make_agent(
            resolve(preset(f"paper/{name}")).agent, schema, seed=0, agent_id=0, device=torch.device("cpu")
        )
        for name in ALGORITHMS
    }
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
