"""The faults of a drill, one at a time, and the time until training goes on after each."""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dase_grpc.errors import REFUSED_CODE, DaseError
from dase_grpc.launch.drill.cluster import DrillCluster, require_code
from dase_grpc.nodes.replay_options import LEASE_TTL_S

BEYOND_TTL_S: Final = LEASE_TTL_S + 2.0
WOKEN_S: Final = 30.0
SETTLED_S: Final = (0.3, 1.5)
"""How long training goes on before the next fault comes, drawn between these."""


@dataclass(frozen=True)
class Outcome:
    """One fault and what came of it.

    Attributes:
        kind: of the fault, e.g. "learner killed".
        agents: who was hit.
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
    """A fault that is due: its kind, one of KINDS; the agents it hits; how long it lasts, where it lasts."""

    kind: str
    agents: tuple[int, ...] = ()
    lasts_s: float = 0.0


KINDS: Final = ("replay killed", "learner killed", "frozen, replaced", "frozen, woken", "cut", "black hole")


def one_round(agents: Sequence[int], rng: random.Random) -> list[Fault]:
    """Each node killed in turn, one frozen beyond its lease, the network of one and of all broken."""
    return [
        Fault("replay killed", tuple(agents)),
        *(Fault("learner killed", (agent_id,)) for agent_id in agents),
        Fault("frozen, replaced", (rng.choice(agents),)),
        Fault("black hole", (rng.choice(agents),), rng.uniform(2.0, 4.0)),
        Fault("cut", tuple(agents), rng.uniform(2.0, 4.0)),
    ]


async def strike(cluster: DrillCluster, fault: Fault, rng: random.Random) -> Outcome:
    """Lets a fault happen to a cluster that trains, and waits until it trains again; never raises ours."""
    try:
        await cluster.until_training(cluster.agents)
        await asyncio.sleep(rng.uniform(*SETTLED_S))
        if fault.kind == "replay killed":
            return await _kill_replay(cluster, fault)
        if fault.kind == "learner killed":
            return await _kill_learner(cluster, fault)
        if fault.kind == "frozen, replaced":
            return await _freeze_and_replace(cluster, fault)
        if fault.kind == "frozen, woken":
            return await _freeze_and_wake(cluster, fault)
        return await _break_network(cluster, fault)
    except DaseError as error:
        return Outcome(fault.kind, fault.agents, fault.lasts_s, None, "", str(error))


async def _kill_replay(cluster: DrillCluster, fault: Fault) -> Outcome:
    if cluster.replay is None:
        raise ValueError("a cluster that trains has a replay")
    await cluster.note_acknowledged(cluster.agents)
    began = time.monotonic()
    await cluster.kill(cluster.replay)
    await cluster.start_replay()
    answered_s = time.monotonic() - began
    took_s = await cluster.until_training(cluster.agents, since=began)
    return Outcome(
        fault.kind, fault.agents, 0.0, took_s, "kill", f"started again, answered after {answered_s:.1f} s"
    )


async def _kill_learner(cluster: DrillCluster, fault: Fault) -> Outcome:
    (agent_id,) = fault.agents
    epochs = await cluster.epochs()
    await cluster.note_acknowledged([agent_id])
    began = time.monotonic()
    await cluster.kill(cluster.learners[agent_id].node)
    await cluster.start_learner(agent_id)
    took_s = await cluster.until_training(fault.agents, epochs={agent_id: epochs[agent_id] + 1}, since=began)
    return Outcome(
        fault.kind, fault.agents, 0.0, took_s, "kill", "resumed once the dead one's lease had ended"
    )


async def _freeze_and_replace(cluster: DrillCluster, fault: Fault) -> Outcome:
    """The frozen one's id goes to a replacement; when it wakes, it is fenced off."""
    (agent_id,) = fault.agents
    epochs = await cluster.epochs()
    await cluster.note_acknowledged([agent_id])
    frozen = cluster.learners[agent_id]
    began = time.monotonic()
    frozen.send(signal.SIGSTOP)
    await cluster.start_learner(agent_id, elsewhere=True)
    took_s = await cluster.until_training(fault.agents, epochs={agent_id: epochs[agent_id] + 1}, since=began)
    lasted_s = time.monotonic() - began
    frozen.send(signal.SIGCONT)
    try:
        await asyncio.wait_for(frozen.node.ended(), WOKEN_S)
    except TimeoutError:
        raise frozen.node.failure(f"did not end within {WOKEN_S:g} s of waking up, though replaced") from None
    require_code(frozen, REFUSED_CODE, says="fenced off")
    return Outcome(fault.kind, fault.agents, lasted_s, took_s, "freeze", "woke up and was fenced off")


async def _freeze_and_wake(cluster: DrillCluster, fault: Fault) -> Outcome:
    """Nobody takes its place, so its lease goes on when it wakes."""
    (agent_id,) = fault.agents
    epochs = await cluster.epochs()
    await cluster.note_acknowledged([agent_id])
    frozen = cluster.learners[agent_id]
    frozen.send(signal.SIGSTOP)
    await asyncio.sleep(fault.lasts_s)
    woken = time.monotonic()
    frozen.send(signal.SIGCONT)
    took_s = await cluster.until_training(fault.agents, since=woken)
    same = (await cluster.epochs())[agent_id] == epochs[agent_id]
    note = "its lease went on" if same else "it joined again"
    return Outcome(fault.kind, fault.agents, fault.lasts_s, took_s, "wake", note)


async def _break_network(cluster: DrillCluster, fault: Fault) -> Outcome:
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
    return Outcome(fault.kind, fault.agents, fault.lasts_s, took_s, "heal")
