"""What a GPU makes of the update loop: updates a second, and environment steps with an update each.

python benchmarks/gpu.py [--device cuda:0] [--seconds 5] [--turns 5] [--results FILE.csv]
python benchmarks/gpu.py --device cpu --quick      a short run of everything on a CPU; its figures say so
python benchmarks/gpu.py --show FILE.csv

Updates are whole ones, DPS included, of batches half of which others collected: by autograd as they are
(eager), through torch.compile, and recorded as one CUDA graph. Steps are those of one TD3 learner on
HalfCheetah, as in LeanRL's figures. Everything takes turns. Without a GPU nothing is run.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from device_rounds import require_device, rounds
from measuring import Entry, Figure, answer, conditions, machine, markdown, median, take_turns, values

from dase_grpc.config.algorithms import ALGORITHMS, DpsConfig
from dase_grpc.config.presets import preset
from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.launch.lockstep import LocalReplay
from dase_grpc.learning.agents.device import use
from dase_grpc.learning.agents.graphs import recorder_for
from dase_grpc.learning.agents.memory import OWN, Memory, StackedMemory
from dase_grpc.learning.agents.registry import make_agent
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.learning.similarity.weigher import SimilarityWeigher
from dase_grpc.learning.training.build import build_learner
from dase_grpc.learning.training.learner import Learner
from dase_grpc.learning.training.statistics import DeviceTotals
from dase_grpc.learning.training.together import StackedUpdate, Taken
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.replay.buffer.ring import RingBuffer
from dase_grpc.replay.buffer.store import ReplayStore
from dase_grpc.schema import TransitionSchema

UPDATES, STEPS, ROUNDS = "updates/s", "steps with an update/s", "updates of a stack/s"
EAGER, COMPILED, CAPTURED, BOTH = "eager", "compiled", "captured", "compiled and captured"
OVERLAPPING, ENVIRONMENT = "captured, overlapping", "environment alone"
ENV: Final = "HalfCheetah-v5"
LEANRL: Final[Mapping[str, float]] = {"LeanRL, eager": 272.0, "LeanRL, compiled and captured": 936.0}
"""Steps a second of TD3 on HalfCheetah on an H100, as github.com/meta-pytorch/LeanRL publishes them."""

ROWS: Final = 256
NEVER: Final = 10**9


@dataclass(frozen=True)
class Plan:
    """What is run: on which device, with which algorithms, for how long, and in which environment."""

    device: torch.device
    algorithms: Sequence[str]
    env: str
    stacks: Sequence[int]
    seconds: float
    turns: int
    compile: bool


def entry(who: str, work: Callable[[], object], plan: Plan) -> Entry:
    """Who does this work on the device."""
    return Entry(who, rounds(work, plan.device, burst=20))


# --- updates ------------------------------------------------------------------------------------------------


def whole_update(
    algorithm: str, device: torch.device, *, captured: bool, compiled: bool = False
) -> Callable[[], object]:
    """An agent's update, as a stack of one, from a batch that lies on the device, half of it external."""
    schema = TransitionSchema(ENV, 17, 6, (-1.0,) * 6, (1.0,) * 6)
    config = resolve(preset(f"paper/{algorithm}"), {"train": {"agents": 2}})
    memory = StackedMemory(1)
    row = memory.of(0)
    DeviceTotals.zero(device, memory=row)
    parts: Any = SimpleNamespace(
        agent=make_agent(config.agent, schema, seed=0, agent_id=0, device=device, memory=row),
        weigher=SimilarityWeigher(DpsConfig(), own_id=0, agents=2, memory=row),
        agent_id=0,
        schema=schema,
        device=device,
        config=config,
    )
    rows = np.random.default_rng(0).standard_normal((ROWS, schema.width), np.float32)
    schema.agent_ids(rows)[:] = np.arange(ROWS) % 2
    taken = [Taken(rows, schema.agent_ids(rows) == 0)]
    update = StackedUpdate([parts], memory, recorder=recorder_for(device) if captured else None)
    update.load(taken)
    if compiled:
        update._make = torch.compile(update._make)  # type: ignore[method-assign]  # the tensor work alone
    return partial(update.make, taken)


def updates(plan: Plan) -> list[Figure]:
    """Updates a second of each algorithm, every way."""
    found = []
    for algorithm in plan.algorithms:
        entries = [
            entry(EAGER, whole_update(algorithm, plan.device, captured=False), plan),
            entry(CAPTURED, whole_update(algorithm, plan.device, captured=True), plan),
        ]
        for who, captured in ((COMPILED, False), (BOTH, True)) if plan.compile else ():
            work = whole_update(algorithm, plan.device, captured=captured, compiled=True)
            try:
                work()
                entries.append(entry(who, work, plan))
            except RuntimeError as error:  # Dynamo's and Inductor's are all of this kind
                reason = str(error).strip().partition("\n")[0]
                print(f"{algorithm}, {who}, is left out: {reason}", file=sys.stderr)
        found += take_turns(entries, subject=algorithm, what=UPDATES, turns=plan.turns, seconds=plan.seconds)
    return found


# --- environment steps --------------------------------------------------------------------------------------


class Silent:
    """A journal that keeps nothing."""

    def evaluation(self, **_: Any) -> None:
        """See Journal."""

    def metrics(self, values: Mapping[str, Any]) -> None:
        """See Journal."""

    def checkpoint(self, **_: Any) -> None:
        """See Journal."""


def configured(plan: Plan, *, agents: int, captured: bool, overlap: bool) -> RunConfig:
    """The paper's TD3 without evaluations, checkpoints and lines of metrics."""
    settings = {
        "env": {"id": plan.env},
        "train": {"agents": agents, "steps": NEVER, "log_every": NEVER, "checkpoint_every": NEVER},
        "agent": {"start_steps": ROWS},
        "replay": {"capacity": 100_000, "min_size": ROWS},
        "eval": {"every": NEVER, "episodes": 1, "max_episode_steps": 1},
    }
    ways = {"train": {"cuda_graph": captured and plan.device.type == "cuda", "overlap": overlap}}
    return resolve(preset("paper/td3"), settings, ways)


def built(plan: Plan, config: RunConfig, agent_id: int = 0, memory: Memory = OWN) -> Learner:
    """A learner on a buffer of its own in this process."""
    env = make_env(config.env.id, config.env.kwargs)
    schema = schema_of(env, config.env.id)
    replay = LocalReplay(ReplayStore(RingBuffer(schema, config.replay.capacity)), config, agent_id)
    return build_learner(
        config,
        schema,
        env=env,
        agent_id=agent_id,
        device=plan.device,
        sink=replay,
        source=replay,
        journal=Silent(),
        metrics=LearnerMetrics(make_registry(), agent_id),
        memory=memory,
    )


def learner(plan: Plan, *, captured: bool, overlap: bool) -> Learner:
    """One TD3 learner that has stored what its first update needs."""
    made = built(plan, configured(plan, agents=1, captured=captured, overlap=overlap))
    made.begin(Event())
    for _ in range(ROWS + 20):
        made.step()
    return made


def environment(plan: Plan) -> Callable[[], object]:
    """Steps of the environment alone, with random actions."""
    env = make_env(plan.env, {})
    env.reset(seed=0)
    action = env.action_space.sample()

    def step() -> None:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()

    return step


def steps(plan: Plan) -> list[Figure]:
    """Environment steps a second, with an update each, and of the environment alone."""
    entries = [entry(ENVIRONMENT, environment(plan), plan)]
    for who, captured, overlap in ((EAGER, False, False), (CAPTURED, True, False), (OVERLAPPING, True, True)):
        made = learner(plan, captured=captured, overlap=overlap)
        entries.append(entry(who, made.step, plan))
    return take_turns(entries, subject=plan.env, what=STEPS, turns=plan.turns, seconds=plan.seconds)


# --- stacks -------------------------------------------------------------------------------------------------


def stacked_update(plan: Plan, count: int) -> Callable[[], object]:
    """One update of each of K TD3 agents at once, from batches in host memory, half of each external."""
    config = configured(plan, agents=max(2, count), captured=True, overlap=False)
    memory = StackedMemory(count)
    parts = [built(plan, config, place, memory.of(place)).parts for place in range(count)]
    update = StackedUpdate(parts, memory, recorder=recorder_for(plan.device))
    schema, rng = parts[0].schema, np.random.default_rng(0)
    taken = []
    for place in range(count):
        rows = rng.standard_normal((ROWS, schema.width), np.float32)
        own = np.arange(ROWS) % 2 == 0
        schema.agent_ids(rows)[:] = np.where(own, place, (place + 1) % max(2, count))
        taken.append(Taken(rows, own))
    return partial(update, taken)


def stacks(plan: Plan) -> list[Figure]:
    """Updates a second of stacks, each of all its agents."""
    entries = [entry(f"K = {count}", stacked_update(plan, count), plan) for count in plan.stacks]
    return take_turns(entries, subject="td3", what=ROUNDS, turns=plan.turns, seconds=plan.seconds)


# --- tables -------------------------------------------------------------------------------------------------


def tables(figures: Sequence[Figure]) -> str:
    """Everything that was measured, and on what."""
    named = conditions(figures)
    if any(figure.machine.startswith("no GPU") for figure in figures):
        named = f"**On a CPU, to see that it works: none of this says anything about a GPU.** {named}"
    return f"{named}\n\n{updates_table(figures)}\n\n{stacks_table(figures)}\n\n{steps_table(figures)}"


def updates_table(figures: Sequence[Figure]) -> str:
    """Updates a second by algorithm, and how many times as fast a CUDA graph is."""
    found = values(figures, what=UPDATES)
    rows = []
    for algorithm in dict.fromkeys(figure.subject for figure in found):
        by = {who: values(found, subject=algorithm, who=who) for who in (EAGER, COMPILED, CAPTURED, BOTH)}
        rate = {who: median(each) if each else None for who, each in by.items()}
        shown = ["" if value is None else f"{value:,.0f}" for value in rate.values()]
        rows.append([algorithm, *shown, f"{(rate[CAPTURED] or 0) / (rate[EAGER] or 1):.2f}"])
    return markdown(("updates/s", EAGER, COMPILED, CAPTURED, BOTH, "captured over eager"), rows)


def stacks_table(figures: Sequence[Figure]) -> str:
    """What an update of K agents at once costs, against one of a stack of one."""
    found = values(figures, what=ROUNDS)
    rates = {who: median(values(found, who=who)) for who in dict.fromkeys(figure.who for figure in found)}
    one = next(iter(rates.values()))
    rows = [
        [who, f"{rate:,.0f}", f"{rate * int(who.removeprefix('K = ')):,.0f}", f"{one / rate:.2f}"]
        for who, rate in rates.items()
    ]
    return markdown(("TD3, stacked", ROUNDS, "updates of one agent/s", "time over K = 1"), rows)


def steps_table(figures: Sequence[Figure]) -> str:
    """Steps a second, against the slower of environment and update, and against what LeanRL publishes."""
    found = values(figures, what=STEPS)
    alone = median(values(found, who=ENVIRONMENT))
    eager, captured = (median(values(figures, what=UPDATES, subject="td3", who=w)) for w in (EAGER, CAPTURED))
    best = LEANRL["LeanRL, compiled and captured"]
    rows = [[ENVIRONMENT, f"{alone:,.0f}", "", ""]]
    for who, update in ((EAGER, eager), (CAPTURED, captured), (OVERLAPPING, captured)):
        rate = median(values(found, who=who))
        rows.append([who, f"{rate:,.0f}", f"{rate / min(alone, update):.0%}", f"{rate / best:.2f}"])
    rows += [
        [f"{who}, published, on an H100", f"{rate:,.0f}", "", f"{rate / best:.2f}"]
        for who, rate in LEANRL.items()
    ]
    head = (
        f"TD3, {found[0].subject}",
        STEPS,
        "of the slower of environment and update",
        "over LeanRL's best",
    )
    return markdown(head, rows)


def on(device: torch.device, figures: Iterable[Figure]) -> list[Figure]:
    """The figures with the device in the machine's name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return [replace(figure, machine=f"{name}, {machine()}, torch {torch.__version__}") for figure in figures]


def measured(given: argparse.Namespace) -> list[Figure]:
    """Measures everything."""
    device = torch.device(given.device)
    require_device("gpu.py", device, otherwise="--device cpu shows that it works")
    use(device)
    torch.set_num_threads(1)
    plan = Plan(device, ALGORITHMS, ENV, (1, 2, 5, 10), given.seconds, given.turns, compile=True)
    if given.quick:
        plan = replace(
            plan,
            algorithms=("td3",),
            env="InvertedPendulum-v5",
            stacks=(1, 2),
            seconds=0.05,
            turns=1,
            compile=False,
        )
    return on(device, [*updates(plan), *stacks(plan), *steps(plan)])


def main() -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu to see that it works")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each way in each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a moment of everything but torch.compile")
    answer(parser, measured, tables)


if __name__ == "__main__":
    main()
