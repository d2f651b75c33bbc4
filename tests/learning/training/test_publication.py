"""Publication: the policy is shown as soon as somebody follows, then now and then; else it costs nothing."""

import pytest
import torch
from learning.agent_cases import CONFIGS, make
from learning.td3_cases import CPU, SCHEMA, as_batch, columns

from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.learning.training.parts import Audience, LocalPolicies, Publication


class Followed(LocalPolicies):
    """Notes every version that is shown; `followed` says whether anybody looks."""

    def __init__(self) -> None:
        self.table = {}
        super().__init__(0, self.table)
        self.versions: list[int] = []
        self.followed = False

    def publish(self, version, tensors):
        self.versions.append(version)
        super().publish(version, tensors)


class Counting:
    """An agent that counts updates and how often its policy was taken."""

    def __init__(self) -> None:
        self.updates = 0
        self.taken = 0

    @property
    def policy(self):
        self.taken += 1
        return self

    def named_tensors(self):
        yield "actor.weight.0", torch.tensor([float(self.updates)])


def publishing(agent, *, publish_every=3, always_when_due=False):
    shown = Followed()
    audience = Audience(shown, lambda: shown.followed, publish_every, always_when_due)
    return shown, Publication(agent, audience)


def test_nothing_is_taken_from_the_agent_while_nobody_follows():
    agent = Counting()
    shown, publication = publishing(agent)
    for agent.updates in range(10):
        publication.look(agent.updates % 2 == 0)
    assert (shown.versions, agent.taken) == ([], 0)


def test_a_policy_is_shown_as_soon_as_somebody_follows_and_then_every_so_many_updates():
    agent = Counting()
    shown, publication = publishing(agent)
    for agent.updates in range(12):
        shown.followed = agent.updates >= 4
        publication.look(due=False)
    assert shown.versions == [4, 7, 10]


def test_who_follows_again_gets_a_policy_at_once():
    agent = Counting()
    shown, publication = publishing(agent, publish_every=100)
    for agent.updates in range(8):
        shown.followed = agent.updates in (1, 2, 5, 6)
        publication.look(due=False)
    assert shown.versions == [1, 5]


def test_the_policy_of_each_step_with_an_evaluation_is_shown_and_counts_as_a_publication():
    agent = Counting()
    shown, publication = publishing(agent)
    shown.followed = True
    for agent.updates in range(8):
        publication.look(agent.updates == 5)
    assert shown.versions == [0, 3, 5]


def test_an_agent_that_does_not_learn_yet_shows_its_policy_at_each_evaluation():
    agent = Counting()
    shown, publication = publishing(agent)
    shown.followed = True
    for step in range(7):
        publication.look(step % 3 == 0)
    assert shown.versions == [0, 0, 0]


def test_what_is_always_due_is_shown_to_nobody_too_and_to_a_first_follower_again():
    agent = Counting()
    shown, publication = publishing(agent, always_when_due=True)
    for agent.updates in range(6):
        shown.followed = agent.updates >= 4
        publication.look(agent.updates % 3 == 0)
    assert shown.versions == [0, 3, 4]


@pytest.mark.parametrize("name", ["td3", "ddpg", "sac normalised"])
def test_what_is_shown_acts_as_the_agent_did_then_its_normaliser_included(name):
    config = CONFIGS[name]
    agent = make(config)
    shown, publication = publishing(agent)
    shown.followed = True
    data = columns()
    agent.update(as_batch(data), torch.ones(len(data["reward"])))
    observation = data["observation"].astype("float32")
    publication.look(due=False)
    before = agent.act(observation)
    agent.update(as_batch(data), torch.ones(len(data["reward"])))
    policy = load_policy(config, SCHEMA, shown.table[0].tensors, CPU)
    assert (policy.act(observation) == before).all()
    assert (policy.act(observation) != agent.act(observation)).any()
