"""The weigher: one similarity for the update, one per collecting agent for the screens."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from learning.gaussians import MEASURED
from learning.peer_rows import batch_of
from torch import Tensor

from dase_grpc.config.algorithms import DIVERGENCES, SCOPES, DpsConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.similarity.measure import similarity_weights
from dase_grpc.learning.similarity.weigher import SimilarityWeigher


def weigher(
    *, divergence: str = "jeffreys", own_id: int = 0, agents: int = 2, masked: bool = False
) -> SimilarityWeigher:
    return SimilarityWeigher(DpsConfig(divergence=divergence), own_id=own_id, agents=agents, masked=masked)


def drawn(ids, *, n: int = 3, noise: float = 0.25) -> tuple[Batch, Tensor]:
    """A batch, and the policy's actions for it."""
    rng = np.random.default_rng(0)
    policy = rng.uniform(-0.6, 0.6, (len(ids), n)).astype(np.float32)
    actions = (policy + noise * rng.standard_normal((len(ids), n))).clip(-1, 1)
    return batch_of(actions, ids), torch.from_numpy(policy)


def assert_no_nan(measured: object) -> None:
    for field in fields(measured):  # type: ignore[arg-type]
        value = getattr(measured, field.name)
        assert not value.isnan().any(), field.name


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("own_id", [0, 1, 3])
def test_the_weights_are_those_of_the_pure_function(kind, own_id):
    batch, policy = drawn([0, 1, 2, 3] * 20)
    weighing = weigher(divergence=kind, own_id=own_id, agents=4, masked=True).weigh(batch, policy)
    expected = similarity_weights(batch.action, policy, batch.agent_id, own_id, divergence=kind)
    assert weighing.weight.dtype == torch.float32
    assert torch.equal(weighing.weight, expected)
    assert int(weighing.external) == 60
    assert not weighing.degenerate


@pytest.mark.parametrize("kind", MEASURED)
def test_the_similarity_is_exp_of_minus_rho(kind):
    batch, policy = drawn([0, 1] * 40)
    weighing = weigher(divergence=kind).weigh(batch, policy)
    assert weighing.similarity.shape == ()
    assert float(weighing.similarity) == pytest.approx(math.exp(-float(weighing.rho)), rel=1e-12)
    assert float(weighing.weight[1]) == pytest.approx(float(weighing.similarity), rel=1e-6)


def test_the_two_terms_sum_to_rho_for_jeffreys_and_are_the_same_for_every_divergence():
    batch, policy = drawn([0, 1] * 40)
    found = {kind: weigher(divergence=kind).weigh(batch, policy) for kind in DIVERGENCES}
    jeffreys = found["jeffreys"]
    assert float(jeffreys.covariance_term + jeffreys.mean_term) == pytest.approx(float(jeffreys.rho))
    for weighing in found.values():
        torch.testing.assert_close(weighing.covariance_term, jeffreys.covariance_term, rtol=1e-12, atol=0)
        torch.testing.assert_close(weighing.mean_term, jeffreys.mean_term, rtol=1e-12, atol=0)


NOTHING = [
    *({"divergence": kind} for kind in DIVERGENCES),
    *({"scope": scope} for scope in SCOPES),
    *({"scope": scope, "memory": 10.0} for scope in ("pooled", "agent")),
]


@pytest.mark.parametrize("options", NOTHING, ids=str)
def test_a_batch_without_external_rows_has_nothing_to_weigh_and_is_not_degenerate(options):
    subject = SimilarityWeigher(DpsConfig(**options), own_id=0, agents=2)
    subject.weigh(*drawn([0, 1] * 20))
    batch, policy = drawn([0] * 20)
    weighing = subject.weigh(batch, policy)
    assert weighing.weight.tolist() == [1.0] * 20
    assert (int(weighing.external), float(weighing.similarity)) == (0, 0.0)
    if "divergence" not in options and "memory" not in options:
        assert float(weighing.rho) == float(weighing.mean_term) == math.inf
    assert not weighing.degenerate
    assert_no_nan(weighing)


@pytest.mark.parametrize("kind", MEASURED)
def test_too_few_external_rows_are_degenerate_and_weigh_nothing(kind):
    for external in (1, 3, 4):
        batch, policy = drawn([1] * external + [0] * 10)
        weighing = weigher(divergence=kind).weigh(batch, policy)
        assert weighing.degenerate
        assert weighing.weight.tolist() == [0.0] * external + [1.0] * 10
        assert float(weighing.rho) == math.inf
        assert_no_nan(weighing)
    batch, policy = drawn([1] * 5 + [0] * 10)
    assert not weigher(divergence=kind).weigh(batch, policy).degenerate


@pytest.mark.parametrize("kind", MEASURED)
def test_a_saturated_dimension_is_degenerate(kind):
    batch, policy = drawn([0, 1] * 30)
    batch.action[:, 2], policy[:, 2] = 1.0, 1.0
    weighing = weigher(divergence=kind).weigh(batch, policy)
    assert weighing.degenerate
    assert weighing.weight.tolist() == [1.0, 0.0] * 30
    assert float(weighing.covariance_term) == float(weighing.mean_term) == math.inf
    assert_no_nan(weighing)


@pytest.mark.parametrize("kind", ["none", "isolated"])
def test_what_needs_no_measurement_is_never_degenerate(kind):
    batch, policy = drawn([1] * 2 + [0] * 10)
    weighing = weigher(divergence=kind).weigh(batch, policy)
    assert not weighing.degenerate
    assert float(weighing.similarity) == (1.0 if kind == "none" else 0.0)


@pytest.mark.parametrize("kind", MEASURED)
def test_each_source_is_measured_by_its_own_rows(kind):
    ids = [0, 1, 2, 3, 1, 2, 3, 3] * 12
    batch, policy = drawn(ids)
    found = weigher(divergence=kind, own_id=2, agents=4).by_source(batch, policy)
    assert found.count.tolist() == [12, 24, 24, 36]
    for agent in (0, 1, 3):
        chosen = (batch.agent_id == agent) | (batch.agent_id == 2)
        alone = similarity_weights(
            batch.action[chosen], policy[chosen], batch.agent_id[chosen], 2, divergence=kind
        )
        assert float(found.similarity[agent]) == pytest.approx(float(alone.min()), rel=1e-6)


@pytest.mark.parametrize("kind", MEASURED)
def test_with_two_agents_the_one_source_is_the_pool(kind):
    batch, policy = drawn([0, 1] * 40)
    subject = weigher(divergence=kind)
    weighing, found = subject.weigh(batch, policy), subject.by_source(batch, policy)
    for name in ("similarity", "rho", "covariance_term", "mean_term"):
        torch.testing.assert_close(getattr(found, name)[1], getattr(weighing, name), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_absent_agents_count_nothing_and_the_own_id_has_similarity_one(kind):
    batch, policy = drawn([0] * 10 + [2] * 30)
    found = weigher(divergence=kind, agents=4).by_source(batch, policy)
    assert found.count.tolist() == [10, 0, 30, 0]
    assert found.similarity[[0, 1, 3]].tolist() == [1.0, 0.0, 0.0]
    assert found.degenerate.tolist() == [False] * 4
    assert [float(part[0]) for part in (found.rho, found.covariance_term, found.mean_term)] == [0.0] * 3
    assert_no_nan(found)


@pytest.mark.parametrize("kind", MEASURED)
def test_a_source_with_too_few_rows_is_degenerate_and_the_others_are_not(kind):
    batch, policy = drawn([1] * 4 + [2] * 30 + [0] * 4)
    found = weigher(divergence=kind, agents=3).by_source(batch, policy)
    assert found.degenerate.tolist() == [False, True, False]
    assert float(found.similarity[1]) == 0
    assert 0 < float(found.similarity[2]) < 1
    assert_no_nan(found)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_agent_ids_beyond_k_are_external_but_no_source(kind):
    batch, policy = drawn([0] * 10 + [1] * 20 + [7] * 20 + [-1] * 20)
    subject = weigher(divergence=kind)
    assert subject.by_source(batch, policy).count.tolist() == [10, 20]
    assert int(subject.weigh(batch, policy).external) == 60


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_own_id_needs_no_rows(kind):
    batch, policy = drawn([1, 2] * 20)
    subject = weigher(divergence=kind, agents=3)
    weighing, found = subject.weigh(batch, policy), subject.by_source(batch, policy)
    assert int(weighing.external) == 40
    assert found.count.tolist() == [0, 20, 20]
    assert float(found.similarity[0]) == 1


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_weighing_with_masks_never_synchronises_with_the_host(kind, unread):
    batch, policy = drawn([0, 1, 2] * 20)
    subject = weigher(divergence=kind, agents=3, masked=True)
    subject.weigh(batch, policy)

    with unread():
        subject.weigh(batch, policy)
        subject.by_source(batch, policy)
