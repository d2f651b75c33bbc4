"""The contract of agents: kept by all that there are, and what is said of those that break it."""

import sys
from pathlib import Path

import pytest
from broken_agents import BROKEN, Narrow, Plain, Raising
from contracts.sentences import refuses

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.ddpg import DDPG
from dase_grpc.learning.agents.promises import MORE, PATIENCE, PROMISES
from dase_grpc.learning.agents.sac import SAC
from dase_grpc.learning.agents.td3 import TD3
from dase_grpc.schema import TransitionSchema
from dase_grpc.testing import AgentContract, AlgorithmError, check_agent

ROOT = Path(__file__).parents[1]


class TestTD3(AgentContract):
    agent = TD3
    config = AgentConfig(algorithm="td3", normalise_observations=True, hidden=(7, 5))


class TestDDPG(AgentContract):
    agent = DDPG
    config = AgentConfig(
        algorithm="ddpg", normalise_observations=True, critic_weight_decay=0.1, hidden=(9, 9)
    )


class TestSAC(AgentContract):
    agent = SAC
    config = AgentConfig(algorithm="sac", reward_scale=5.0)
    schema = TransitionSchema("wide", 11, 1, (-2.0,), (2.0,))


@pytest.mark.slow
@pytest.mark.parametrize("agent", [TD3, DDPG, SAC, Plain])
def test_the_agents_that_there_are_keep_what_they_promise(agent):
    check_agent(agent)


def test_the_example_keeps_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    import my_agent

    check_agent(my_agent.DriftingTD3)


@pytest.mark.slow
@pytest.mark.parametrize("agent", BROKEN)
def test_a_broken_promise_is_named_in_a_sentence(agent):
    name, said = BROKEN[agent]
    promise = {**PROMISES, **MORE}[name]
    named = f"{agent.__name__} breaks the promise of agents '{name}' ({promise.says}): "
    with refuses(AlgorithmError, named, said):
        check_agent(agent)


def test_a_policy_that_moves_after_a_million_updates_is_not_waited_for(monkeypatch):
    made: list[TD3] = []
    monkeypatch.setattr(TD3, "__init__", _noted(TD3.__init__, made))
    config = AgentConfig(algorithm="td3", policy_delay=1_000_000, hidden=(8,))
    check_agent(TD3, config=config)
    assert max(agent.updates for agent in made) == PATIENCE


def _noted(make, made: list):
    def noted(agent, *args, **kwargs):
        made.append(agent)
        make(agent, *args, **kwargs)

    return noted


def test_each_promise_is_broken_by_somebody():
    assert {name for name, _ in BROKEN.values()} == {*PROMISES, *MORE}


@pytest.mark.parametrize(
    ("agent", "cause", "said"),
    [(Raising, ValueError, "no such thing"), (Narrow, TypeError, ".*unexpected keyword argument 'memory'")],
)
def test_what_an_agent_raises_is_said_and_kept_as_the_cause(agent, cause, said):
    with pytest.raises(AlgorithmError, match=f"it failed with {cause.__name__}: {said}") as caught:
        check_agent(agent)
    assert isinstance(caught.value.__cause__, cause)


def test_an_agent_that_shall_not_be_stacked_need_not_keep_that_promise():
    (scaled,) = (agent for agent, (name, _) in BROKEN.items() if name == "stack")
    check_agent(scaled, stacks=False)


def test_the_page_lists_every_promise():
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    for name, promise in {**PROMISES, **MORE}.items():
        assert f"| `{name}` | {promise.says} |" in page
