"""How fast a cluster is: what grew between two looks at it, per second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dase_grpc.errors import DaseError
from dase_grpc.observe.view import AgentView, ClusterView


@dataclass(frozen=True)
class Look:
    """What the replays said at `at`, in seconds of a monotonic clock.

    Attributes:
        cluster: None where no replay answered.
        silent: the replays that did not answer, by address, and why.
    """

    at: float
    cluster: ClusterView | None
    silent: Mapping[str, DaseError] = field(default_factory=dict)


@dataclass(frozen=True)
class Rates:
    """Per second; None where it is not known. env_steps is that of the learners whose own is known.

    inserted and sampled are in transitions.
    """

    inserted: float | None = None
    sampled: float | None = None
    env_steps: float | None = None
    steps_by_agent: Mapping[int, float] = field(default_factory=dict)


def rates(before: Look, now: Look) -> Rates:
    """What happened from one look to a later one."""
    if before.cluster is None or now.cluster is None:
        return Rates()
    was, is_now = before.cluster.buffer, now.cluster.buffer
    known = {agent.agent_id: agent for agent in before.cluster.agents}
    steps = {
        agent.agent_id: speed
        for agent in now.cluster.agents
        if (speed := _steps(known.get(agent.agent_id), before.at, agent, now.at)) is not None
    }
    same = was.incarnations == is_now.incarnations and bool(was.capacity)
    took_s = now.at - before.at
    return Rates(
        inserted=_per_second(was.inserted, is_now.inserted, took_s) if same else None,
        sampled=_per_second(was.sampled, is_now.sampled, took_s) if same else None,
        env_steps=sum(steps.values()) if steps else None,
        steps_by_agent=steps,
    )


def course(looks: Sequence[Look]) -> list[Rates]:
    """The rates from each look to the next, the latest last."""
    return [rates(before, now) for before, now in pairwise(looks)]


def _steps(before: AgentView | None, seen_at: float, now: AgentView, at: float) -> float | None:
    """An agent's steps per second, by when it told its step and not by when somebody looked."""
    if before is None or before.epoch != now.epoch or now.lease != "live":
        return None
    took_s = (at - now.silent_s) - (seen_at - before.silent_s)
    return _per_second(before.progress.step, now.progress.step, took_s)


def _per_second(before: int, now: int, took_s: float) -> float | None:
    return (now - before) / took_s if took_s > 0.1 and now >= before else None
