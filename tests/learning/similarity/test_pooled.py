"""DPS of all external rows in few calls says what its reference twin with masks says."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from learning.agent_cases import make, tiny
from learning.peer_rows import batch_of
from learning.td3_cases import SCHEMA, as_batch, columns
from torch import Tensor

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.similarity.weigher import SimilarityWeigher, Weighing, weighed


def policy_and_batch(deviation: np.ndarray, ids: np.ndarray) -> tuple[Batch, Tensor]:
    """A batch of those deviations from a policy, and the policy's actions."""
    policy = np.random.default_rng(1).uniform(-0.6, 0.6, deviation.shape).astype(np.float32)
    return batch_of(policy + deviation, ids), torch.from_numpy(policy)


def normal(*, n: int, external: int, internal: int = 9, scale: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n + external)
    ids = np.repeat([1, 0], [external, internal])
    rng.shuffle(ids)
    return scale * rng.normal(size=(len(ids), n)), ids


def assert_alike(found: Weighing, twin: Weighing, *, rtol: float = 1e-11) -> None:
    for field in fields(Weighing):
        ours, theirs = getattr(found, field.name), getattr(twin, field.name)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), field.name
        limit = 2e-7 if ours.dtype == torch.float32 else rtol
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=1e-300)


def both(batch: Batch, policy: Tensor, options: DpsConfig | None = None) -> tuple[Weighing, Weighing]:
    """By all rows' policy actions, which is compared with external rows' alone on the way; and the twin's."""
    given = options or DpsConfig()
    subject, alone = (SimilarityWeigher(given, own_id=0, agents=2) for _ in range(2))
    twin = SimilarityWeigher(given, own_id=0, agents=2, masked=True).weigh(batch, policy)
    rows = subject.rows_to_judge(batch)
    assert rows is not None
    found = subject.weigh(batch, policy)
    assert_alike(alone.weigh(batch, policy[rows], rows=rows), found, rtol=0)
    return found, twin


@pytest.mark.parametrize("n", [1, 3, 17])
@pytest.mark.parametrize("external", [0, 1, "n + 1", "n + 2", 128])
def test_any_number_of_external_rows(n, external):
    count = {"n + 1": n + 1, "n + 2": n + 2}.get(external, external)
    batch, policy = policy_and_batch(*normal(n=n, external=count))
    found, twin = both(batch, policy)
    assert bool(twin.degenerate) == (0 < count <= n + 1)
    assert_alike(found, twin, rtol=1e-7 if external == "n + 2" else 1e-11)  # hardly definite: ill-conditioned


def test_no_internal_rows():
    assert_alike(*both(*policy_and_batch(*normal(n=3, external=40, internal=0))))


@pytest.mark.parametrize("value", [0.0, 0.1, -0.3, None])
def test_dimensions_with_one_deviation_or_that_follow_from_each_other_are_degenerate(value):
    batch, policy = policy_and_batch(*normal(n=4, external=60))
    policy[:, 2] = 0.5
    batch.action[:, 2] = 0.5 + (2 * (batch.action - policy)[:, 0] if value is None else value)
    found, twin = both(batch, policy)
    assert twin.degenerate
    assert_alike(found, twin)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["actions", "policy"])
def test_an_external_row_that_is_not_finite_is_degenerate(value, where):
    deviation, ids = normal(n=3, external=60)
    batch, policy = policy_and_batch(deviation, ids)
    (batch.action if where == "actions" else policy)[ids.argmax(), 1] = value
    found, twin = both(batch, policy)
    assert twin.degenerate
    assert_alike(found, twin)


def test_an_internal_row_that_is_not_finite_changes_nothing():
    deviation, ids = normal(n=3, external=60)
    batch, policy = policy_and_batch(deviation, ids)
    before, _ = both(batch, policy)
    policy[ids.argmin()] = math.nan
    found, twin = both(batch, policy)
    assert_alike(found, twin)
    assert torch.equal(found.weight, before.weight)


@pytest.mark.parametrize("scale", [1e-3, 1e15, 1e30])
def test_a_similarity_that_underflows_is_not_degenerate(scale):
    found, twin = both(*policy_and_batch(*normal(n=3, external=60, scale=scale)))
    assert float(found.similarity) == 0
    assert not found.degenerate
    assert_alike(found, twin, rtol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        DpsConfig(scope="agent"),
        DpsConfig(scope="transition"),
        DpsConfig(memory=5.0),
        DpsConfig(floor=True),
        DpsConfig(shrinkage=0.5),
        DpsConfig(debias=True),
        DpsConfig(normalise=True),
        DpsConfig(divergence="js"),
        DpsConfig(divergence="none"),
    ],
    ids=str,
)
def test_all_other_options_are_left_to_the_twin_whether_or_not_the_internal_rows_are_known(options):
    found, twin = both(*policy_and_batch(*normal(n=3, external=30)), options)
    assert_alike(found, twin, rtol=0)


@pytest.mark.parametrize("settings", [{"policy_delay": 2}, {"normalise_observations": True}], ids=str)
def test_an_agent_s_batch_weighs_the_same_whatever_part_of_its_policy_is_asked_for(settings):
    agent, data = make(tiny("td3", **settings)), columns()
    weigher = SimilarityWeigher(DpsConfig(), own_id=0, agents=2)
    batch = as_batch(data)
    batch.agent_id[::2] = 1
    asked = []
    for _ in range(4):
        every = weigher.weigh(batch, agent.policy_actions(batch.observation))
        weighing, actions = weighed(agent, weigher, batch)
        assert_alike(weighing, every, rtol=1e-4)  # float32 passes over other numbers of rows
        asked.append(actions is not None)
        agent.update(batch, weighing.weight, actions=actions)
    assert asked == ([False, True] * 2 if "policy_delay" in settings else [False] * 4)


def test_rows_that_count_are_gathered_as_views_of_each_other():
    batch = as_batch(columns())
    chosen = torch.tensor([4, 1, 1])
    found = batch.at(chosen)
    for field in fields(Batch):
        assert torch.equal(getattr(found, field.name), getattr(batch, field.name)[chosen]), field.name
    assert found.observation.shape[1] == SCHEMA.observation_size
    assert found.action.data_ptr() == found.state_action[:, SCHEMA.observation_size :].data_ptr()
