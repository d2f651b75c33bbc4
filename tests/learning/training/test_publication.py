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


@pytest.mark.parametrize(
    ("followed", "due", "options", "versions"),
    [
        pytest.param([], [0, 2, 4, 6, 8], {}, [], id="nobody follows"),
        pytest.param(
            range(4, 12), [], {}, [4, 7, 10], id="as soon as somebody does, then every three updates"
        ),
        pytest.param([1, 2, 5, 6], [], {"publish_every": 100}, [1, 5], id="who follows again, at once"),
        pytest.param(range(12), [5], {}, [0, 3, 5, 8, 11], id="an evaluation's counts as one"),
        pytest.param(
            range(4, 6),
            [0, 3],
            {"always_when_due": True},
            [0, 3, 4],
            id="always due, and to a first follower",
        ),
    ],
)
def test_a_policy_is_shown_while_somebody_follows_and_where_it_is_due(followed, due, options, versions):
    agent = Counting()
    shown, publication = publishing(agent, **options)
    for agent.updates in range(12):
        shown.followed = agent.updates in followed
        publication.look(agent.updates in due)
    assert (shown.versions, agent.taken) == (versions, len(versions))


def test_an_agent_that_does_not_learn_yet_shows_its_policy_at_each_evaluation():
    agent = Counting()
    shown, publication = publishing(agent)
    shown.followed = True
    for step in range(7):
        publication.look(step % 3 == 0)
    assert shown.versions == [0, 0, 0]


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
