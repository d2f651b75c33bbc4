"""The Prometheus metrics of whatever explores: the actor role, and each learner."""

from collections.abc import Iterable
from typing import ClassVar, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from dase_grpc.metrics.endpoint import loop_lag

REFUSAL_REASONS: Final = ("observation", "reward")
RESTART_REASONS: Final = ("step", "reset", "evaluation")


class StreamMetrics(Protocol):
    """What a connection counts."""

    losses: Counter

    def reconnected(self, stream: str, grpc_code: str) -> None:
        """Counts a stream that was answered again, by the name of the status it had broken with."""
        ...


class ExplorerMetrics:
    """What exploring shows, bound to an agent id.

    Counters by reason begin at 0 for each reason there is: Prometheus does not see the step from nothing
    to one.

    Attributes:
        role: which role's streams and waits are counted.
    """

    role: ClassVar[str]

    def __init__(self, registry: CollectorRegistry, agent_id: int) -> None:
        self._registry = registry
        self._id, self._agent = agent_id, str(agent_id)
        self.loop_lag = loop_lag(registry)
        self.env_steps = self._counter("dase_explorer_env_steps", "Environment steps.")
        self.episodes = self._counter("dase_explorer_episodes", "Episodes ended.")
        self.episode_return = self._gauge("dase_explorer_episode_return", "Return of the latest episode.")
        self.policy_lag = self._gauge(
            "dase_explorer_policy_lag_updates",
            "Training iterations by which the exploring policy is behind; 0 where the learner explores.",
        )
        self.unacknowledged = self._gauge(
            "dase_explorer_unacknowledged_transitions", "Transitions whose commit is not acknowledged."
        )
        self.acknowledged = self._counter(
            "dase_explorer_acknowledged_transitions",
            "Transitions whose commit the replay has acknowledged.",
        )
        self._refused = self._counters(
            "dase_explorer_refused_transitions",
            "Transitions not sent because a value was not finite.",
            reasons=REFUSAL_REASONS,
        )
        self._restarts = self._counters(
            "dase_explorer_env_restarts",
            "Environments made anew because they raised, by what did: step, reset, evaluation.",
            reasons=RESTART_REASONS,
        )
        self._declare_outages()

    def _declare_outages(self) -> None:
        self.losses = self._counter(
            f"dase_{self.role}_replay_losses", "Times that the replay came back without transitions it had."
        )
        self._reconnects = Counter(
            f"dase_{self.role}_reconnects",
            "Streams that were answered again after they had broken, by the status they broke with.",
            ["agent_id", "stream", "grpc_code"],
            registry=self._registry,
        )
        self._waiting_seconds = self._counters(
            f"dase_{self.role}_waiting_seconds",
            "Time spent in waits that lasted longer than 5 s, by what was waited for.",
        )

    def expect(self, *, streams: Iterable[str], waits: Iterable[str]) -> None:
        """Begins at 0 what can happen to a node with a network: broken streams, and waits by reason."""
        for stream in streams:
            self._reconnects.labels(self._agent, stream, "UNAVAILABLE")
        for reason in waits:
            self._waiting_seconds.labels(self._agent, reason)

    def reconnected(self, stream: str, grpc_code: str) -> None:
        """Counts a stream that was answered again, by the name of the status it had broken with."""
        self._reconnects.labels(self._agent, stream, grpc_code).inc()

    def waited(self, reason: str, seconds: float) -> None:
        """Adds to the time spent waiting."""
        self._waiting_seconds.labels(self._agent, reason).inc(seconds)

    def refused(self, reason: str) -> None:
        """Counts a transition that was not sent."""
        self._refused.labels(self._agent, reason).inc()

    def restarted(self, reason: str) -> None:
        """Counts an environment that was made anew."""
        self._restarts.labels(self._agent, reason).inc()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["agent_id"], registry=self._registry).labels(self._agent)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["agent_id"], registry=self._registry).labels(self._agent)

    def _counters(self, name: str, text: str, *, reasons: Iterable[str] = ()) -> Counter:
        counter = Counter(name, text, ["agent_id", "reason"], registry=self._registry)
        for reason in reasons:
            counter.labels(self._agent, reason)
        return counter


class ActorMetrics(ExplorerMetrics):
    """The actor role's metrics."""

    role = "actor"

    def __init__(self, registry: CollectorRegistry, agent_id: int) -> None:
        super().__init__(registry, agent_id)
        self.envs = self._gauge("dase_actor_environments", "Environments that this actor steps.")
