"""Shows the policy that is being trained to whoever follows it: actors, evaluators."""

from collections.abc import Callable
from dataclasses import dataclass

from dase_grpc.learning.agents.agent import Agent
from dase_grpc.learning.training.publishing import PeerPolicies


def to_nobody(due: bool) -> None:
    """What a learner calls whose policy nobody can follow."""


@dataclass(frozen=True)
class Audience:
    """Where a learner's policy is shown, and whether anybody looks; `followed` is asked at every step.

    Attributes:
        publish_every: updates between two publications.
        always_when_due: show it at each step with an evaluation due, whether or not anybody looks.
    """

    policies: PeerPolicies
    followed: Callable[[], bool]
    publish_every: int
    always_when_due: bool = False


class Publication:
    """Publishes an agent's actor and normaliser; nothing is copied, and no device waited for, unless it does.

    Owned by the thread that trains the agent.
    """

    def __init__(self, agent: Agent, audience: Audience) -> None:
        self._agent = agent
        self._audience = audience
        self._published: int | None = None  # the version, while somebody follows

    def look(self, due: bool) -> None:
        """Publishes the policy where that is due: call once after each environment step.

        That is as soon as somebody follows, then every `publish_every` updates, and where `due` says so,
        which it does at each step with an evaluation.
        """
        followed = self._audience.followed()
        if not followed:
            self._published = None
        if (due and (followed or self._audience.always_when_due)) or (followed and self._is_old):
            self._published = self._agent.updates if followed else None
            self._audience.policies.publish(self._agent.updates, dict(self._agent.policy.named_tensors()))

    @property
    def _is_old(self) -> bool:
        if self._published is None:
            return True
        return self._agent.updates - self._published >= self._audience.publish_every
