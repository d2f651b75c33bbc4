"""Tests of a learning algorithm of one's own: all that agents promise, with or without pytest."""

from typing import Any, ClassVar

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.errors import AlgorithmError
from dase_grpc.learning.agents.promises import MORE, PROMISES, STACK, require_kept
from dase_grpc.learning.agents.trial import Trial
from dase_grpc.schema import TransitionSchema

__all__ = ["AgentContract", "AlgorithmError", "check_agent"]


def check_agent(
    agent: type[Any],
    *,
    config: AgentConfig | None = None,
    schema: TransitionSchema | None = None,
    stacks: bool = True,
) -> None:
    """Tries all promises on a class of agents, with small networks unless `config` says otherwise.

    Args:
        agent: the class.
        config: settings of its agents; `algorithm` in it says who it is in messages.
        schema: what its observations and actions are like.
        stacks: whether it shall learn in a stack and on a GPU too, if it is an `ActorCritic`.

    Raises:
        AlgorithmError: a promise is broken; in one sentence that names it.
    """
    trial = _trial(agent, config, schema)
    for promise in _promises(trial, stacks=stacks):
        require_kept(promise, trial)


class AgentContract:
    """The promises as tests for pytest, one for each: a class of yours that begins with `Test` inherits them.

    Attributes:
        agent: the class of agents.
        config, schema, stacks: as `check_agent` takes them.
    """

    agent: ClassVar[type[Any]]
    config: ClassVar[AgentConfig | None] = None
    schema: ClassVar[TransitionSchema | None] = None
    stacks: ClassVar[bool] = True

    @classmethod
    def _tried(cls) -> Trial:
        return _trial(cls.agent, cls.config, cls.schema)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Makes pytest call each test once for each promise."""
        if "promise" in metafunc.fixturenames:
            metafunc.parametrize("promise", _promises(self._tried(), stacks=self.stacks))

    def test_promise(self, promise: str) -> None:
        """One promise is kept."""
        require_kept(promise, self._tried())


def _trial(agent: type[Any], config: AgentConfig | None, schema: TransitionSchema | None) -> Trial:
    name = f"{agent.__module__}:{agent.__qualname__}"
    if config is None:
        config = AgentConfig(algorithm=name, hidden=(16, 16), actor_lr=1e-3, critic_lr=1e-3)
    if schema is None:
        schema = TransitionSchema("a-test", 3, 2, (-1.0, -1.0), (1.0, 1.0))
    return Trial(agent, config, schema)


def _promises(trial: Trial, *, stacks: bool) -> list[str]:
    more = MORE if trial.has_values else ()
    return [*PROMISES, *(name for name in more if stacks or name != STACK)]
