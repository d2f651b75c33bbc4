"""Algorithms by import path: found, or refused in a sentence."""

import sys

import pytest
from contracts.sentences import refuses
from learning.agent_cases import make, tiny
from learning.td3_cases import CPU, SCHEMA, assert_same

from dase_grpc.errors import AlgorithmError
from dase_grpc.learning.agents.dpd import terms
from dase_grpc.learning.agents.registry import exploration, load_algorithm, make_agent
from dase_grpc.learning.envs.noise import Gaussian

MINE = """
from dase_grpc.learning.agents.td3 import TD3

CONSTANT = 1.0

class Again(TD3):
    pass

class Halved(TD3):
    @classmethod
    def exploration(cls, config, schema):
        from dase_grpc.learning.envs.noise import Gaussian
        return Gaussian(config.exploration_noise / 2)

class Quiet(TD3):
    @staticmethod
    def exploration(config, schema):
        return None
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    (tmp_path / "algorithms_of_mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("algorithms_of_mine", None)


def path(name: str) -> str:
    return f"algorithms_of_mine:{name}"


def test_a_class_that_adds_nothing_makes_the_same_agent():
    agent = make_agent(tiny(path("Again")), SCHEMA, seed=1, agent_id=0, device=CPU)
    assert type(agent).__name__ == "Again"
    assert_same(agent.state_dict(), make(tiny("td3")).state_dict())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("algorithms_of_mine:missing", ("has no algorithm 'missing'; name a class",)),
        ("algorithms_of_mine:CONSTANT", ("is an object of type float; name a class of agents",)),
        ("nowhere:Agent", ("there is no module 'nowhere' for the algorithm 'nowhere:Agent'",)),
        ("mine.py:Agent", ("names a file, but algorithms are named by their module", "write mine:Agent")),
    ],
)
def test_what_is_no_class_of_agents_is_refused_in_a_sentence(name, parts):
    with refuses(AlgorithmError, *parts):
        load_algorithm(name)


@pytest.mark.parametrize(("name", "deviation"), [("td3", 0.1), (path("Again"), 0.1), (path("Halved"), 0.05)])
def test_an_algorithm_may_bring_its_exploration(name, deviation):
    noise = exploration(tiny(name), SCHEMA)
    assert isinstance(noise, Gaussian)
    assert noise.deviation == deviation


def test_what_is_no_noise_is_refused():
    with refuses(AlgorithmError, "exploration of the algorithm", "returned nothing; return a new Noise"):
        exploration(tiny(path("Quiet")), SCHEMA)


def test_two_of_a_pair_know_whether_they_learn_by_the_same_algorithm():
    names = ("td3", "ddpg", "sac", path("Again"), path("Halved"))
    numbers = [int(terms(tiny(name))["terms.algorithm"]) for name in names]
    assert numbers[:3] == [0, 1, 2]
    assert len(set(numbers)) == len(names)
