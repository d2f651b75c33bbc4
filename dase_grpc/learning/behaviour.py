"""What explorers act by, and who says so."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dase_grpc.learning.agents.agent import Agent, Policy


@dataclass(frozen=True)
class Behaviour:
    """What to act by: a policy and the training iterations it has had, or nothing, meaning uniformly."""

    policy: Policy | None
    version: int


class Guide(Protocol):
    """Says what to act by; asked before each round."""

    def behaviour(self) -> Behaviour:
        """The latest; never waits.

        Raises:
            DaseError: what was published is no policy of this agent.
        """
        ...


class LearnersGuide(Protocol):
    """Says what a learner acts by that trains the policy itself. Owned by the thread that trains."""

    def behaviour(self) -> Behaviour:
        """What to act by now; may wait for the device."""
        ...

    def updated(self) -> None:
        """The agent has had an update, which may still be queued on its device."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """What a checkpoint has to keep, the tensors themselves; whoever writes into them sets them."""
        ...

    def resumed(self) -> None:
        """The agent and `tensors` have been set to what was saved."""
        ...


class Current:
    """A `LearnersGuide` to the agent as it is."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def behaviour(self) -> Behaviour:
        """See LearnersGuide; never waits."""
        return Behaviour(self._agent, self._agent.updates)

    def updated(self) -> None:
        """See LearnersGuide."""

    def tensors(self) -> Mapping[str, Tensor]:
        """See LearnersGuide."""
        return {}

    def resumed(self) -> None:
        """See LearnersGuide."""
