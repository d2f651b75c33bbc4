"""What a node that holds no lease, an actor or an evaluator, says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attendance:
    """A node's latest numbers; None where one is not known.

    Attributes:
        envs: environments it steps.
        env_steps: environment steps so far.
        policy_version: of the policy it acts by, or has evaluated last.
        policy_lag_updates: how many updates the learner is ahead of that.
        state: one of "starting", "exploring", "evaluating", "waiting: <for what>".
    """

    envs: int = 0
    env_steps: int = 0
    env_steps_per_second: float = 0.0
    policy_version: int | None = None
    policy_lag_updates: float | None = None
    state: str = "starting"


@dataclass(frozen=True)
class Attendant:
    """A node that holds no lease.

    Attributes:
        node_id: random, the same for as long as the node lives.
        role: "actor" or "evaluator".
        agent_id: whose policy an actor acts by; an evaluator without one evaluates all.
    """

    node_id: str
    node_name: str
    role: str
    agent_id: int | None = None

    @property
    def writer_id(self) -> str:
        """The name under which it stores transitions, if it does; no other node has it, now or later."""
        return f"{self.role}-{self.node_id}"
