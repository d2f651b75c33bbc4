"""How far a learner is: the few numbers that heartbeats carry and every screen shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """A learner's latest numbers; None where one is not known yet.

    similarity maps the agent that collected transitions to their latest similarity weight.
    state is one of "starting", "exploring", "training", "waiting: <for what>", "finished".
    """

    step: int = 0
    total_steps: int = 0
    updates: int = 0
    updates_per_second: float = 0.0
    episode_return: float | None = None
    first_evaluation_return: float | None = None
    evaluation_return: float | None = None
    similarity: Mapping[int, float] = field(default_factory=dict)
    state: str = "starting"
