"""What updating K agents at once is worth beside updating one after the other.

python benchmarks/stack.py [--device cpu] [--algorithm td3] [--agents 1 2 5 10] [--seconds 2] [--turns 3]
                           [--results FILE.csv]
python benchmarks/stack.py --quick
python benchmarks/stack.py --show FILE.csv

Updates are whole ones, DPS included, of batches of 256 that hold as many rows of each agent, and lie ready
in host memory. `stack` is what `dase train --stack` does, recorded as one CUDA graph on a GPU; `one by one`
is what `--lockstep` does on this device; `one by one, by autograd` is that by the stack's equations.
Everything takes turns. An update of K agents counts as K.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from device_rounds import require_device, rounds
from measuring import Entry, Figure, answer, conditions, markdown, median, take_turns, values

from dase_grpc.config.algorithms import ALGORITHMS, DpsConfig
from dase_grpc.config.presets import preset
from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.learning.agents.batch import Staging
from dase_grpc.learning.agents.device import use
from dase_grpc.learning.agents.graphs import recorder_for
from dase_grpc.learning.agents.memory import OWN, StackedMemory
from dase_grpc.learning.agents.registry import make_agent
from dase_grpc.learning.similarity.weigher import SimilarityWeigher, weighed
from dase_grpc.learning.training.statistics import DeviceTotals
from dase_grpc.learning.training.together import StackedUpdate, Taken
from dase_grpc.schema import TransitionSchema

STACK, ONE_BY_ONE, AUTOGRAD = "stack", "one by one", "one by one, by autograd"
UPDATES: Final = "agents' updates/s"
SCHEMA: Final = TransitionSchema("HalfCheetah-v5", 17, 6, (-1.0,) * 6, (1.0,) * 6)
ROWS: Final = 256


def batches(agents: int) -> list[Taken]:
    """A batch for each agent, of rows that all have collected in turn."""
    found = []
    for agent in range(agents):
        rows = np.random.default_rng(agent).standard_normal((ROWS, SCHEMA.width)).astype(np.float32)
        ids = SCHEMA.agent_ids(rows)
        ids[:] = np.arange(ROWS) % agents
        found.append(Taken(rows, ids == agent))
    return found


def stacked(config: RunConfig, device: torch.device, *, captured: bool = True) -> Callable[[], object]:
    """One update of all `config.train.agents` agents at once, staging included."""
    agents = config.train.agents
    memory = StackedMemory(agents)
    parts: list[Any] = []
    for agent_id in range(agents):
        row = memory.of(agent_id)
        DeviceTotals.zero(device, memory=row)
        weigher = SimilarityWeigher(DpsConfig(), own_id=agent_id, agents=agents, memory=row)
        agent = make_agent(config.agent, SCHEMA, seed=0, agent_id=agent_id, device=device, memory=row)
        parts.append(
            SimpleNamespace(
                agent=agent, weigher=weigher, agent_id=agent_id, schema=SCHEMA, device=device, config=config
            )
        )
    update = StackedUpdate(parts, memory, recorder=recorder_for(device) if captured else None)
    return partial(update, batches(agents))


def one_by_one(config: RunConfig, device: torch.device, *, autograd: bool | None) -> Callable[[], object]:
    """An update of each agent, one after the other, staging included."""
    count, works = config.train.agents, []
    for agent_id, taken in enumerate(batches(count)):
        agent = make_agent(
            config.agent, SCHEMA, seed=0, agent_id=agent_id, device=device, memory=OWN, autograd=autograd
        )
        weigher = SimilarityWeigher(DpsConfig(), own_id=agent_id, agents=count, masked=bool(autograd))
        works.append(partial(_one, agent, weigher, Staging(SCHEMA, ROWS, device), taken))

    def update() -> None:
        for work in works:
            work()

    return update


def _one(agent: Any, weigher: SimilarityWeigher, staging: Staging, taken: Taken) -> None:
    batch = staging.load(taken.rows)
    if taken.own.all():
        agent.update(batch, torch.ones_like(batch.reward))
    else:
        weighing, actions = weighed(agent, weigher, batch)
        agent.update(batch, weighing.weight, actions=actions)


def measure(
    algorithm: str, counts: Sequence[int], device: torch.device, *, turns: int, seconds: float
) -> list[Figure]:
    """Updates a second of all agents together, for each K and each way."""
    found = []
    for count in counts:
        config = resolve(preset(f"paper/{algorithm}"), {"train": {"agents": count}})
        ways = {
            STACK: stacked(config, device),
            ONE_BY_ONE: one_by_one(config, device, autograd=None),
            AUTOGRAD: one_by_one(config, device, autograd=True),
        }
        entries = [Entry(name, rounds(work, device, events=count)) for name, work in ways.items()]
        subject = f"{algorithm}, K = {count}"
        found += take_turns(entries, subject=subject, what=UPDATES, turns=turns, seconds=seconds)
    return found


def table(figures: Sequence[Figure]) -> str:
    """All of it as Markdown."""
    rows = []
    for subject in dict.fromkeys(figure.subject for figure in figures):
        rates = [median(values(figures, subject=subject, who=who)) for who in (STACK, ONE_BY_ONE, AUTOGRAD)]
        ratios = [f"{rates[0] / other:.2f}" for other in rates[1:]]
        rows.append([subject, *(f"{rate:,.0f}" for rate in rates), *ratios])
    head = ("", STACK, ONE_BY_ONE, AUTOGRAD, "stack / one by one", "stack / by autograd")
    return f"{conditions(figures)}\n\n{markdown(head, rows)}"


def measured(given: argparse.Namespace) -> list[Figure]:
    """Measures what is asked for."""
    require_device("stack.py", given.device, otherwise="leave --device out")
    torch.set_num_threads(1)
    use(given.device)
    counts, turns, seconds = ((1, 2), 1, 0.05) if given.quick else (given.agents, given.turns, given.seconds)
    return measure(given.algorithm, counts, given.device, turns=turns, seconds=seconds)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device, help="cpu, or cuda:0")
    parser.add_argument("--algorithm", default="td3", choices=ALGORITHMS)
    parser.add_argument("--agents", nargs="+", type=int, default=[1, 2, 5, 10], help="each K")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each way in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short turn, K = 1 and 2")
    answer(parser, measured, table)


if __name__ == "__main__":
    main()
