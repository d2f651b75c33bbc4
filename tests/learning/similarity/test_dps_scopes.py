"""The scopes of the measure against an oracle in NumPy's eigenvalues and SciPy's densities."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learning.gaussians import MEASURED, jeffreys_oracle, kl_oracle, quick, seeds, sizes
from learning.peer_rows import EVERY, FINE, OPTIONS, OWN, R, flags, rows, shares
from scipy import stats

from dase_grpc.config.algorithms import SCOPES
from dase_grpc.learning.similarity.measure import similarity_weights

# --- the oracle -------------------------------------------------------------------------------------------


def rho_oracle(mean, cov, kind: str) -> float:
    if kind == "kl":
        return kl_oracle(mean, cov, np.zeros(len(mean)), R * np.eye(len(mean)))
    return jeffreys_oracle(mean, cov, R)


def group_oracle(
    deviation, *, kind="jeffreys", floor=False, normalise=False, shrinkage=0.0, debias=False
) -> float:
    """λ of one group of deviations, (N, n)."""
    size, n = deviation.shape
    if size <= n + 1 and not floor and not shrinkage:
        return 0.0
    cov = np.cov(deviation, rowvar=False).reshape(n, n) if size > 1 else np.zeros((n, n))
    cov = (1 - shrinkage) * cov + shrinkage * R * np.eye(n)
    if floor:
        values, vectors = np.linalg.eigh(cov)
        cov = vectors @ np.diag(np.maximum(values, R)) @ vectors.T
    rho = rho_oracle(deviation.mean(0), cov, kind)
    if debias:
        rho = max(rho - n * (n + 3) / (4 * size), 0)
    return math.exp(-rho / n if normalise else -rho)


# --- scope ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jeffreys", "kl"])
@pytest.mark.parametrize("scope", ["agent", "pooled"])
@quick
@given(
    seed=seeds, n=sizes, each=st.integers(1, 20), floor=flags, normalise=flags, shrinkage=shares, debias=flags
)
def test_the_rows_of_each_agent_or_of_all_weigh_what_the_oracle_says(kind, scope, seed, n, each, **options):
    actions, policy, ids = rows(seed, n=n, each=each)
    weights = similarity_weights(actions, policy, ids, OWN, scope=scope, divergence=kind, **options)
    for group in [ids == agent for agent in (0, 2, 3)] if scope == "agent" else [ids != OWN]:
        expected = group_oracle((actions - policy)[group], kind=kind, **options)
        np.testing.assert_allclose(weights[group], expected, rtol=1e-5, atol=FINE)
    assert bool((weights[ids == OWN] == 1).all())


@pytest.mark.parametrize("kind", ["jeffreys", "kl"])
@quick
@given(seed=seeds, n=sizes, floor=flags, normalise=flags, shrinkage=shares, debias=flags)
def test_a_transition_weighs_its_density_under_the_reference_as_a_share_of_the_peak(
    kind, seed, n, floor, normalise, shrinkage, debias
):
    actions, policy, ids = rows(seed, n=n)
    weights = similarity_weights(
        actions, policy, ids, OWN, scope="transition", divergence=kind,
        floor=floor, normalise=normalise, shrinkage=shrinkage, debias=debias,
    )  # fmt: skip
    reference = stats.multivariate_normal(np.zeros(n), R * np.eye(n))
    rho = np.atleast_1d(reference.logpdf(np.zeros(n)) - reference.logpdf(actions - policy))
    if debias:
        rho = np.maximum(rho - n / 2, 0)
    expected = np.where(ids == OWN, 1, np.exp(-rho / n if normalise else -rho))
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=FINE)


def test_true_js_of_a_transition_is_that_of_the_shifted_reference():
    actions, policy, ids = rows(3, each=3)
    weights = similarity_weights(actions, policy, ids, OWN, scope="transition", divergence="js")
    for deviation, weight in zip((actions - policy)[ids != OWN], weights[ids != OWN], strict=True):
        p, q = stats.norm(np.linalg.norm(deviation), math.sqrt(R)), stats.norm(0, math.sqrt(R))
        x = np.linspace(-3, 4, 4001)
        middle = (p.pdf(x) + q.pdf(x)) / 2
        entropy = sum(np.sum(each.pdf(x) * np.log(each.pdf(x) / middle)) for each in (p, q)) / 2
        assert float(weight) == pytest.approx(math.exp(-entropy * (x[1] - x[0])), abs=1e-3)


@pytest.mark.parametrize("options", OPTIONS)
def test_with_one_peer_the_agent_s_scope_is_the_pool(options):
    actions, policy, ids = rows(5, agents=2)
    pooled = similarity_weights(actions, policy, ids, OWN, **options)
    np.testing.assert_allclose(
        similarity_weights(actions, policy, ids, OWN, scope="agent", **options), pooled, rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["jeffreys", "kl", "js"])
def test_a_lone_row_under_full_shrinkage_weighs_what_the_transition_does(kind):
    actions, policy, ids = rows(6, each=1, agents=9)
    each, alone = (
        similarity_weights(actions, policy, ids, OWN, scope=scope, divergence=kind, shrinkage=1.0)
        for scope in ("transition", "agent")
    )
    np.testing.assert_allclose(each, alone, atol=1e-3 if kind == "js" else FINE)


def test_a_peer_that_acts_otherwise_no_longer_lowers_the_others():
    actions, policy, ids = rows(7, each=60, noise=0.3)
    actions = np.where(ids[:, None] == 3, -policy + 0.9, actions)
    weights = similarity_weights(actions, policy, ids, OWN, scope="agent", floor=True)
    alone = ids != 3
    np.testing.assert_allclose(
        weights[alone],
        similarity_weights(actions[alone], policy[alone], ids[alone], OWN, scope="agent", floor=True),
        rtol=1e-6,
    )
    assert float(weights[ids == 3].max()) < float(weights[ids == 0].min()) / 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize("scope", SCOPES)
@quick
@given(seed=seeds)
def test_the_order_of_the_rows_does_not_matter(scope, kind, seed):
    actions, policy, ids = rows(seed)
    order = np.random.default_rng(seed).permutation(len(ids))
    here = similarity_weights(actions, policy, ids, OWN, scope=scope, divergence=kind)
    there = similarity_weights(actions[order], policy[order], ids[order], OWN, scope=scope, divergence=kind)
    np.testing.assert_allclose(there, here[order], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("scope", "options"), EVERY)
def test_the_axes_and_the_unit_of_the_actions_do_not_matter(scope, options):
    actions, policy, ids = rows(8)
    turn, unit = stats.ortho_group.rvs(3, random_state=1), 3.0
    here = similarity_weights(actions, policy, ids, OWN, scope=scope, **options)
    turned = unit * actions @ turn, unit * policy @ turn
    there = similarity_weights(*turned, ids, OWN, scope=scope, reference_variance=9 * R, **options)
    np.testing.assert_allclose(there, here, rtol=1e-5, atol=1e-9)


def test_rows_that_are_not_finite_weigh_nothing_and_hurt_no_others():
    actions, policy, ids = rows(9, each=20)
    clean = {scope: similarity_weights(actions, policy, ids, OWN, scope=scope) for scope in SCOPES}
    row = int(np.flatnonzero(ids == 2)[0])
    actions[row, 1] = math.nan
    each = similarity_weights(actions, policy, ids, OWN, scope="transition", floor=True)
    assert float(each[row]) == 0
    others = np.arange(len(ids)) != row
    np.testing.assert_array_equal(each[others], clean["transition"][others])
    agent = similarity_weights(actions, policy, ids, OWN, scope="agent")
    assert float(agent[ids == 2].max()) == 0
    np.testing.assert_allclose(agent[ids != 2], clean["agent"][ids != 2], rtol=1e-6)
