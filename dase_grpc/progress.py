"""The word of a node about itself: a learner's Progress, an actor's or evaluator's Attendance."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

FINISHED: Final = "finished"
"""The state of a learner that has done all its steps."""

MAX_AGENT_ID: Final = 1023
MAX_PAIRED_AGENTS: Final = 64
"""What there is for each pair of agents is told of the first of them alone, so it does not grow with K²."""

LOWEST_WEIGHT: Final = 1e-9
"""Smaller similarity weights are shown as that: they cannot change a float32 sum."""


@dataclass(frozen=True)
class Progress:
    """A learner's latest numbers; None where one is not known yet.

    similarity_weight is the latest λ that weighed a batch's external transitions, one for all of them.
    similarity maps each agent that collected some to λ of its own alone, a diagnostic that weighs nothing.
    updates_per_second is that of the latest updates, evaluations left out; 0 where it is not known yet.
    state is one of "starting", "exploring", "training", "waiting: <for what>", "finished", "stopped".
    """

    step: int = 0
    total_steps: int = 0
    updates: int = 0
    updates_per_second: float = 0.0
    episode_return: float | None = None
    evaluation_return: float | None = None
    first_evaluation_return: float | None = None
    similarity_weight: float | None = None
    similarity: Mapping[int, float] = field(default_factory=dict)
    state: str = "starting"


def evaluation_line(progress: Progress) -> str:
    """What a log says after an evaluation: how far the learner is and how well it does, if it is known."""
    text = (
        f"step {progress.step:,} of {progress.total_steps:,}: evaluation {number(progress.evaluation_return)}"
    )
    if progress.step:
        text += f" (first {number(progress.first_evaluation_return)})"
    if progress.episode_return is not None:
        text += f", return {number(progress.episode_return)}"
    if progress.updates_per_second:
        text += f", {progress.updates_per_second:.0f} updates/s"
    if progress.similarity_weight is not None:
        text += f", λ {weight(progress.similarity_weight)}"
    return text


def weight(value: float) -> str:
    """A similarity weight λ, short; one that can change nothing as that."""
    return f"<{LOWEST_WEIGHT:g}" if 0 < value < LOWEST_WEIGHT else f"{value:.2g}"


def number(value: float | None) -> str:
    """A return, short."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if abs(value) < 1e7 else f"{value:.3g}"


def several(count: int, noun: str, plural: str = "") -> str:
    """For example "1 writer" or "2,000 writers"; a plural is given where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def duration(seconds: float) -> str:
    """For example "2 min 10 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def ago(seconds: float) -> str:
    """How long ago something was, in a few characters: 0.4 s, 12 s, 7 min, 3 h."""
    for unit_s, unit in ((3_600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:,.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


@dataclass(frozen=True)
class Attendance:
    """A node's latest numbers; None where one is not known.

    policy_version is of the policy it acts by, or has evaluated last, policy_lag_updates how many updates the
    learner is ahead of that. state is one of "starting", "exploring", "evaluating", "waiting: <for what>".
    """

    envs: int = 0
    env_steps: int = 0
    env_steps_per_second: float = 0.0
    policy_version: int | None = None
    policy_lag_updates: float | None = None
    state: str = "starting"


@dataclass(frozen=True)
class Attendant:
    """A node that holds no lease: an "actor" of one agent, or an "evaluator" of one or of all (None).

    node_id is random, the same for as long as the node lives.
    """

    node_id: str
    node_name: str
    role: str
    agent_id: int | None = None

    @property
    def writer_id(self) -> str:
        """The name under which it stores transitions, if it does; no other node has it, now or later."""
        return f"{self.role}-{self.node_id}"


def is_newer(version: int, published: int | None) -> bool:
    """Whether a version comes after `published`, which is None at first; a lower one is a ValueError."""
    if published is not None and version < published:
        raise ValueError(f"policy {version} cannot be published after policy {published}")
    return published is None or version > published
