"""The options of the measure against an oracle in NumPy's eigenvalues and SciPy's densities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning.gaussians import quick, seeds, sizes
from learning.peer_rows import EVERY, FINE, OPTIONS, OWN, R, batch_of, flags, rows, shares
from torch import Tensor

from dase_grpc.config.algorithms import DIVERGENCES, SCOPES, DpsConfig
from dase_grpc.config.resolve import resolve
from dase_grpc.errors import ConfigError
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.similarity.measure import measure, similarity_weights
from dase_grpc.learning.similarity.moments import floored, moments, shrunk
from dase_grpc.learning.similarity.weigher import SimilarityWeigher


def as_batch(actions, policy, ids, *, dtype=torch.float64) -> tuple[Batch, Tensor]:
    return batch_of(actions, ids), torch.as_tensor(policy, dtype=dtype)


# --- options ----------------------------------------------------------------------------------------------


@quick
@given(seeds, sizes, st.floats(0.01, 20.0))
def test_the_floor_raises_only_the_eigenvalues_below_the_reference(seed, n, scale):
    root = np.random.default_rng(seed).standard_normal((n, n + 1))
    cov = scale * R * root @ root.T / n
    values, vectors = np.linalg.eigh(cov)
    expected = vectors @ np.diag(np.maximum(values, R)) @ vectors.T
    np.testing.assert_allclose(floored(torch.as_tensor(cov), R), expected, atol=1e-6 * np.abs(cov).max())


def test_the_floor_of_singular_and_reference_covariances_is_exact():
    reference = R * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(floored(reference, R), reference, rtol=0, atol=0)
    torch.testing.assert_close(floored(0 * reference, R), reference, rtol=1e-14, atol=0)
    torch.testing.assert_close(floored(9 * reference, R), 9 * reference, rtol=1e-14, atol=1e-15)


@quick
@given(seeds, sizes, st.floats(0, 1))
def test_floor_and_shrinkage_commute(seed, n, share):
    root = torch.as_tensor(np.random.default_rng(seed).standard_normal((n, n)))
    cov = R * root @ root.T
    first, second = floored(shrunk(cov, R, share), R), shrunk(floored(cov, R), R, share)
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7 * float(cov.abs().max()))


@pytest.mark.parametrize("n", [1, 3, 6, 17])
def test_with_the_floor_identical_policies_under_exploration_noise_weigh_fully(n):
    noise = np.random.default_rng(n).standard_normal((200, n))
    weight = similarity_weights(0.1 * noise, np.zeros((200, n)), [0] * 200, OWN, floor=True)[0]
    exact = similarity_weights(0 * noise, np.zeros((200, n)), [0] * 200, OWN, floor=True)[0]
    assert float(exact) == pytest.approx(1, abs=1e-7)
    assert float(weight) == pytest.approx(1, abs=0.02)


@quick
@given(seeds, sizes, flags, shares, flags)
def test_no_regularisation_and_no_correction_lowers_a_weight_below_its_plain_one(
    seed, n, floor, shrinkage, debias
):
    """Each eigenvalue comes nearer to r or stays, and the correction only subtracts."""
    actions, policy, ids = rows(seed, n=n, noise=0.1)
    actions = policy + (actions - policy) - (actions - policy)[ids != OWN].mean(0)
    plain = similarity_weights(actions, policy, ids, OWN)
    found = similarity_weights(
        actions, policy, ids, OWN, floor=floor, shrinkage=shrinkage, debias=debias, normalise=True
    )
    assert bool((found >= plain - FINE).all())
    assert bool((found <= 1).all())


@pytest.mark.slow
def test_the_correction_removes_the_average_of_equal_gaussians():
    """To first order in 1/N, for the Jeffreys divergence, KL and true JS alike."""
    rng, n, size, groups = np.random.default_rng(0), 3, 64, 100
    deviation = torch.as_tensor(math.sqrt(R) * rng.standard_normal((groups * size, n)))
    member = torch.arange(groups)[:, None] == torch.arange(groups * size) // size
    for kind in ("jeffreys", "kl", "js"):
        plain = measure(deviation, member, DpsConfig(divergence=kind)).rho
        expected = n * (n + 3) / (4 * size) * (0.25 if kind == "js" else 1)
        assert float(plain.mean()) == pytest.approx(expected, rel=0.2)
        corrected = measure(deviation, member, DpsConfig(divergence=kind, debias=True)).rho
        torch.testing.assert_close(corrected, (plain - expected).clamp(min=0), rtol=1e-9, atol=1e-12)
        assert bool((corrected >= 0).all())


@pytest.mark.parametrize("options", [{"debias": True}, {"normalise": True}])
@pytest.mark.parametrize("scope", ["pooled", "agent"])
def test_a_correction_alone_still_refuses_few_rows(scope, options):
    actions, policy, ids = rows(10, each=4, agents=2)
    weights = similarity_weights(actions, policy, ids, OWN, scope=scope, **options)
    assert weights[ids != OWN].tolist() == [0.0] * 4


@pytest.mark.parametrize("options", [{"floor": True}, {"shrinkage": 0.01}])
@pytest.mark.parametrize("scope", ["pooled", "agent"])
def test_a_regularised_covariance_is_measured_from_any_number_of_rows(scope, options):
    for each in (1, 2, 4):
        actions, policy, ids = rows(11, each=each, agents=2, noise=0.02)
        found = similarity_weights(actions, policy, ids, OWN, scope=scope, normalise=True, **options)
        assert float(found[ids != OWN].min()) > 0


@pytest.mark.parametrize(("scope", "options"), EVERY)
def test_none_and_isolated_look_at_no_option(scope, options):
    actions, policy, ids = rows(12)
    for kind, expected in (("none", 1.0), ("isolated", 0.0)):
        weights = similarity_weights(actions, policy, ids, OWN, scope=scope, divergence=kind, **options)
        assert set(weights[ids != OWN].tolist()) == {expected}


@pytest.mark.parametrize("options", [{"floor": True}, {"shrinkage": 0.4}])
def test_the_reported_terms_are_those_of_the_changed_covariance(options):
    actions, policy, ids = rows(13)
    deviation, member = torch.as_tensor(actions - policy), torch.as_tensor(ids != OWN)[None]
    found = measure(deviation, member, DpsConfig(**options))
    torch.testing.assert_close(found.covariance_term + found.mean_term, found.rho)
    mean, cov, _ = moments(deviation, member)
    changed = floored(cov, R) if "floor" in options else shrunk(cov, R, 0.4)
    expected = float(changed[0].trace() / R + R * changed[0].inverse().trace() - 6) / 4
    assert float(found.covariance_term) == pytest.approx(expected, rel=1e-9)
    assert float(found.mean_term) == pytest.approx(
        float(mean[0] @ (torch.eye(3) / R + changed[0].inverse()) @ mean[0]) / 4, rel=1e-9
    )


# --- the weigher ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scope", "options"), EVERY)
@pytest.mark.parametrize("kind", ["jeffreys", "js", "none", "isolated"])
def test_the_weigher_gives_the_weights_of_the_pure_function(kind, scope, options):
    if (kind, scope, options.get("debias")) == ("js", "transition", True):
        return
    batch, policy = as_batch(*rows(14))
    weighing = SimilarityWeigher(
        DpsConfig(divergence=kind, scope=scope, **options), own_id=OWN, agents=4
    ).weigh(batch, policy)
    expected = similarity_weights(
        batch.action, policy, batch.agent_id, OWN, divergence=kind, scope=scope, **options
    )
    torch.testing.assert_close(weighing.weight, expected, rtol=1e-6, atol=0)
    external = batch.agent_id != OWN
    assert int(weighing.external) == int(external.sum())
    assert float(weighing.similarity) == pytest.approx(float(weighing.weight[external].mean()), rel=1e-5)


def test_the_agents_weights_are_those_shown_by_source():
    batch, policy = as_batch(*rows(15))
    weigher = SimilarityWeigher(DpsConfig(scope="agent"), own_id=OWN, agents=4)
    shown, weight = weigher.by_source(batch, policy).similarity, weigher.weigh(batch, policy).weight
    torch.testing.assert_close(shown[batch.agent_id.long()].float(), weight, rtol=1e-6, atol=0)


def test_with_one_weight_per_transition_a_source_shows_the_mean_of_its_rows():
    batch, policy = as_batch(*rows(16))
    weigher = SimilarityWeigher(DpsConfig(scope="transition"), own_id=OWN, agents=5)
    found, weight = weigher.by_source(batch, policy), weigher.weigh(batch, policy).weight
    for agent in (0, 2, 3):
        mine = batch.agent_id == agent
        assert float(found.similarity[agent]) == pytest.approx(float(weight[mine].mean()), rel=1e-5)
    assert float(found.similarity[OWN]) == 1
    assert (int(found.count[4]), float(found.similarity[4])) == (0, 0.0)
    assert not found.degenerate.any()


def test_an_agent_with_too_few_rows_is_degenerate_and_hides_no_other():
    actions, policy, ids = rows(17, each=20)
    keep = (ids != 2) | (np.cumsum(ids == 2) <= 4)
    batch, wanted = as_batch(actions[keep], policy[keep], ids[keep])
    weighing = SimilarityWeigher(DpsConfig(scope="agent"), own_id=OWN, agents=4).weigh(batch, wanted)
    assert weighing.degenerate
    assert weighing.rho.isfinite()
    assert set(weighing.weight[batch.agent_id == 2].tolist()) == {0.0}
    assert float(weighing.weight[batch.agent_id == 0].min()) > 0


def test_rows_of_unknown_agents_weigh_nothing_in_the_agent_s_scope():
    actions, policy, ids = rows(18, each=20)
    batch, wanted = as_batch(actions, policy, np.where(ids == 3, 9, ids))
    weighing = SimilarityWeigher(DpsConfig(scope="agent"), own_id=OWN, agents=4).weigh(batch, wanted)
    assert weighing.degenerate
    assert set(weighing.weight[batch.agent_id == 9].tolist()) == {0.0}


# --- promises ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_no_scope_and_no_option_synchronises_with_the_host(kind, scope, unread):
    options = {**OPTIONS[-1], "debias": (kind, scope) != ("js", "transition")}
    actions, policy, ids = (torch.as_tensor(part) for part in rows(20))
    batch, wanted = as_batch(*rows(20))
    weigher = SimilarityWeigher(DpsConfig(divergence=kind, scope=scope, **options), own_id=OWN, agents=4)
    similarity_weights(actions, policy, ids, OWN, divergence=kind, scope=scope, **options)
    weigher.weigh(batch, wanted)

    with unread():
        similarity_weights(actions, policy, ids, OWN, divergence=kind, scope=scope, **options)
        weigher.weigh(batch, wanted)
        weigher.by_source(batch, wanted)


def test_the_correction_that_has_no_equation_is_refused_by_function_and_configuration():
    with pytest.raises(ConfigError, match="debias = true is not known"):
        similarity_weights([[0.0]], [[0.0]], [0], OWN, divergence="js", scope="transition", debias=True)
    with pytest.raises(ConfigError, match="debias = true is not known"):
        resolve({"dps": {"divergence": "js", "scope": "transition", "debias": True}})
