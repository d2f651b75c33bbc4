"""How far a learner is: the few numbers that heartbeats carry and every screen shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """A learner's latest numbers; None where one is not known yet.

    similarity_weight is the latest λ that weighed a batch's external transitions, one for all of them.
    similarity maps each agent that collected some to λ of its own alone, a diagnostic that weighs nothing.
    state is one of "starting", "exploring", "training", "waiting: <for what>", "finished", "stopped".
    """

    step: int = 0
    total_steps: int = 0
    updates: int = 0
    updates_per_second: float = 0.0
    episode_return: float | None = None
    first_evaluation_return: float | None = None
    evaluation_return: float | None = None
    similarity: Mapping[int, float] = field(default_factory=dict)
    similarity_weight: float | None = None
    state: str = "starting"
