"""The faults of a drill, one at a time, and the time until training goes on after each."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dase_grpc.errors import REFUSED_CODE, DaseError
from dase_grpc.launch.drill.cluster import DrillCluster, DrillLearner
from dase_grpc.launch.processes import Node
from dase_grpc.nodes.replay_options import LEASE_TTL_S

BEYOND_TTL_S: Final = LEASE_TTL_S + 2.0
WOKEN_S: Final = 30.0
FENCED_OFF: Final = "fenced off"
SETTLED_S: Final = (0.3, 1.5)
"""How long training goes on before the next fault comes, drawn between these."""


@dataclass(frozen=True)
class FaultOutcome:
    """One fault of some agents and what came of it.

    Attributes:
        lasted_s: how long the fault itself lasted: the freeze, the cut; 0 for a kill.
        recovered_s: seconds from `clock_from` until the updates of all of these went up again; None if they
            did not.
        clock_from: "kill", "freeze", "wake" or "heal".
        note: what happened, or why nothing did.
    """

    kind: str
    agents: tuple[int, ...]
    lasted_s: float
    recovered_s: float | None
    clock_from: str
    note: str = ""


@dataclass(frozen=True)
class Fault:
    """A fault that is due: its kind, one of STRIKES, the agents it hits, and how long it lasts."""

    kind: str
    agents: tuple[int, ...] = ()
    lasts_s: float = 0.0


def one_round(agents: Sequence[int], rng: random.Random) -> list[Fault]:
    """Each node killed in turn, one frozen beyond its lease, the network of one and of all broken."""
    return [
        Fault("replay killed", tuple(agents)),
        *(Fault("learner killed", (agent_id,)) for agent_id in agents),
        Fault("frozen, replaced", (rng.choice(agents),)),
        Fault("black hole", (rng.choice(agents),), rng.uniform(2.0, 4.0)),
        Fault("cut", tuple(agents), rng.uniform(2.0, 4.0)),
    ]


async def strike(cluster: DrillCluster, fault: Fault, rng: random.Random) -> FaultOutcome:
    """Lets a fault happen to a cluster that trains, and waits until it trains again; never raises ours."""
    try:
        await cluster.until_training(cluster.agents)
        await asyncio.sleep(rng.uniform(*SETTLED_S))
        return await STRIKES[fault.kind](cluster, fault)
    except DaseError as error:
        return FaultOutcome(fault.kind, fault.agents, fault.lasts_s, None, "", str(error))


async def _kill_replay(cluster: DrillCluster, fault: Fault) -> FaultOutcome:
    if cluster.replay is None:
        raise ValueError("a cluster that trains has a replay")
    await cluster.note_acknowledged(cluster.agents)
    began = time.monotonic()
    await _kill(cluster.replay)
    await cluster.start_replay()
    answered_s = time.monotonic() - began
    took_s = await cluster.until_training(cluster.agents, since=began)
    return FaultOutcome(
        fault.kind, fault.agents, 0.0, took_s, "kill", f"started again, answered after {answered_s:.1f} s"
    )


async def _kill_learner(cluster: DrillCluster, fault: Fault) -> FaultOutcome:
    (agent_id,) = fault.agents
    epochs = await cluster.epochs()
    await cluster.note_acknowledged([agent_id])
    began = time.monotonic()
    await _kill(cluster.learners[agent_id].node)
    await cluster.start_learner(agent_id)
    took_s = await cluster.until_training(fault.agents, epochs={agent_id: epochs[agent_id] + 1}, since=began)
    return FaultOutcome(fault.kind, fault.agents, 0.0, took_s, "kill", "resumed under the next lease")


async def _freeze_and_replace(cluster: DrillCluster, fault: Fault) -> FaultOutcome:
    """The frozen one's id goes to a replacement; when it wakes, it is fenced off."""
    frozen, epochs, began = await _freeze(cluster, fault)
    await cluster.start_learner(frozen.agent_id, elsewhere=True)
    epoch = epochs[frozen.agent_id] + 1
    took_s = await cluster.until_training(fault.agents, epochs={frozen.agent_id: epoch}, since=began)
    lasted_s = time.monotonic() - began
    frozen.send(signal.SIGCONT)
    try:
        code = await asyncio.wait_for(frozen.node.ended(), WOKEN_S)
    except TimeoutError:
        raise frozen.node.failure(f"did not end within {WOKEN_S:g} s of waking up, though replaced") from None
    if code != REFUSED_CODE or FENCED_OFF not in frozen.node.log.read_text(errors="replace"):
        raise frozen.node.failure(f"did not end with exit code {REFUSED_CODE} and {FENCED_OFF!r}")
    return FaultOutcome(fault.kind, fault.agents, lasted_s, took_s, "freeze", "woke up and was fenced off")


async def _freeze_and_wake(cluster: DrillCluster, fault: Fault) -> FaultOutcome:
    """Nobody takes its place, so its lease goes on when it wakes."""
    frozen, epochs, _ = await _freeze(cluster, fault)
    await asyncio.sleep(fault.lasts_s)
    woken = time.monotonic()
    frozen.send(signal.SIGCONT)
    took_s = await cluster.until_training(fault.agents, since=woken)
    same = (await cluster.epochs())[frozen.agent_id] == epochs[frozen.agent_id]
    note = "its lease went on" if same else "it joined again"
    return FaultOutcome(fault.kind, fault.agents, fault.lasts_s, took_s, "wake", note)


async def _freeze(cluster: DrillCluster, fault: Fault) -> tuple[DrillLearner, dict[int, int], float]:
    """The learner that is frozen now, the epochs of all agents before, and since when."""
    (agent_id,) = fault.agents
    epochs = await cluster.epochs()
    await cluster.note_acknowledged([agent_id])
    began = time.monotonic()
    cluster.learners[agent_id].send(signal.SIGSTOP)
    return cluster.learners[agent_id], epochs, began


async def _break_network(cluster: DrillCluster, fault: Fault) -> FaultOutcome:
    proxies = [cluster.proxies[agent_id] for agent_id in fault.agents]
    for proxy in proxies:
        if fault.kind == "cut":
            proxy.cut()
        else:
            proxy.hang()
    await asyncio.sleep(fault.lasts_s)
    healed = time.monotonic()
    for proxy in proxies:
        proxy.heal()
    took_s = await cluster.until_training(fault.agents, since=healed)
    return FaultOutcome(fault.kind, fault.agents, fault.lasts_s, took_s, "heal")


async def _kill(node: Node) -> None:
    """SIGKILL; returns when the process has ended, with what it has left behind."""
    node.kill("the drill")
    await node.ended()


STRIKES: Final[Mapping[str, Callable[[DrillCluster, Fault], Awaitable[FaultOutcome]]]] = {
    "replay killed": _kill_replay,
    "learner killed": _kill_learner,
    "frozen, replaced": _freeze_and_replace,
    "frozen, woken": _freeze_and_wake,
    "cut": _break_network,
    "black hole": _break_network,
}
"""What happens to the cluster, by the fault's kind."""
