"""The built-in measures against closed forms that share no code with them, and their degenerate cases."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning.peer_rows import EVERY, OWN, batch_of, rows
from scipy import stats

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.learning.similarity.measures import (
    Context,
    Rows,
    advantage,
    relative,
    relative_rows,
    similarity,
)
from dase_grpc.learning.similarity.weigher import SimilarityWeigher


def context_of(actions, policy, ids, *, q=None, **options) -> Context:
    batch, wanted = batch_of(actions, ids), torch.as_tensor(np.asarray(policy, np.float32))
    sides = [torch.from_numpy(np.flatnonzero(side)) for side in (ids != OWN, ids == OWN)]
    external, own = (Rows(batch, side, lambda _, side=side: wanted[side]) for side in sides)
    return Context(
        external, own, OWN, agents=4, version=0, q=q or (lambda s, a: a.sum(-1)), options=DpsConfig(**options)
    )


def kl(p: stats.rv_continuous, q: stats.rv_continuous) -> float:
    """KL(p‖q) of two of SciPy's multivariate Gaussians by the trace formula in NumPy."""
    shift, inverse = q.mean - p.mean, np.linalg.inv(q.cov)
    terms = np.trace(inverse @ p.cov) + shift @ inverse @ shift - len(shift)
    return (terms + np.linalg.slogdet(q.cov)[1] - np.linalg.slogdet(p.cov)[1]) / 2


def gaussian(deviation) -> stats.rv_continuous:
    return stats.multivariate_normal(deviation.mean(0), np.cov(deviation.T))


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("n", [2, 3, 6])
def test_relative_is_the_jeffreys_divergence_between_both_sides_deviations(n, normalise):
    actions, policy, ids = rows(0, n=n, each=30)
    context = context_of(actions, policy, ids, normalise=normalise)
    external, own = (gaussian(side.deviation.numpy()) for side in (context.external, context.own))
    rho = (kl(external, own) + kl(own, external)) / 2 / (n if normalise else 1)
    found = relative(context)
    assert found.shape == (90,)
    assert found.numpy() == pytest.approx(np.exp(-rho), rel=1e-9)


def test_relative_is_one_where_both_sides_deviate_alike_whatever_the_units():
    actions, policy, _ = rows(1, n=6, each=10)
    for unit in (1.0, 1e-3):
        deviation = unit * (actions - policy)
        twice = np.concatenate([deviation, deviation])
        context = context_of(twice, np.zeros_like(twice), np.repeat([0, OWN], len(deviation)))
        assert relative(context).numpy() == pytest.approx(1.0, abs=1e-6)


def test_relative_rows_measures_each_row_in_units_of_the_own_ones():
    actions, policy, ids = rows(2, n=3, each=20)
    context = context_of(actions, policy, ids)
    own, external = context.own.deviation.numpy(), context.external.deviation.numpy()
    inverse = np.linalg.inv(own.T @ own / len(own))
    square = np.einsum("ei,ij,ej->e", external, inverse, external) / 3
    assert relative_rows(context).numpy() == pytest.approx(np.exp(-np.maximum(0, square - 1) / 2), rel=1e-9)


def test_relative_rows_of_the_own_side_is_one_on_average_in_its_exponent():
    own = np.random.default_rng(3).normal(size=(50, 4)).astype(np.float32)
    root = np.linalg.inv(np.linalg.cholesky(own.T @ own / len(own)))
    assert np.square(own @ root.T).sum(1).mean() / 4 == pytest.approx(1.0, rel=1e-5)
    context = context_of(np.concatenate([own, own]), np.zeros((100, 4)), np.repeat([0, OWN], 50))
    assert float(relative_rows(context).min()) < 1.0 == float(relative_rows(context).max())


@pytest.mark.parametrize("measured", [relative, relative_rows])
@pytest.mark.parametrize("why", ["few own rows", "own rows in a plane", "no own rows"])
def test_without_a_reference_nothing_is_known(measured, why):
    actions, policy, ids = rows(4, n=3, each=12)
    if why == "few own rows":
        ids = np.where((ids == OWN) & (np.cumsum(ids == OWN) > 4), 0, ids)
    elif why == "no own rows":
        ids = np.where(ids == OWN, 0, ids)
    else:
        actions[ids == OWN, 2] = policy[ids == OWN, 2] = 0.25
    found = measured(context_of(actions, policy, ids))
    assert len(found) == (ids != OWN).sum()
    assert bool(found.isnan().all())


def test_advantage_compares_with_the_root_mean_square_of_the_own_ones():
    actions, policy, ids = rows(5, n=2, each=10)
    worth = np.array([1.0, -2.0])
    found = advantage(context_of(actions, policy, ids, q=lambda s, a: a @ torch.tensor([1.0, -2.0])))
    gained = (actions.astype(np.float32) - policy.astype(np.float32)) @ worth
    scale = np.sqrt(np.mean(gained[ids == OWN] ** 2))
    assert found.numpy() == pytest.approx(np.exp(np.minimum(0, gained[ids != OWN] / scale)), rel=1e-4)


@pytest.mark.parametrize(("q", "expected"), [(lambda s, a: 0 * a.sum(-1), 1.0)])
def test_an_advantage_that_nobody_has_is_none(q, expected):
    assert set(advantage(context_of(*rows(6), q=q)).tolist()) == {expected}


def test_no_advantage_is_known_without_own_rows():
    actions, policy, ids = rows(6)
    assert bool(advantage(context_of(actions, policy, np.where(ids == OWN, 0, ids))).isnan().all())


def test_an_advantage_over_a_value_that_is_not_finite_is_not_known():
    actions, policy, ids = rows(6)
    found = advantage(context_of(actions, policy, ids, q=lambda s, a: torch.full((len(a),), torch.inf)))
    assert bool(found.isnan().all())


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "options"), EVERY, ids=str)
def test_similarity_is_what_the_weigher_of_the_default_finds(scope, options):
    actions, policy, ids = rows(7)
    context = context_of(actions, policy, ids, scope=scope, **options)
    weigher = SimilarityWeigher(context.options, own_id=OWN, agents=4)
    weight = weigher.weigh(batch_of(actions, ids), torch.as_tensor(np.float32(policy))).weight[ids != OWN]
    torch.testing.assert_close(similarity(context).float(), weight, rtol=1e-6, atol=0)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 6), each=st.integers(1, 20))
def test_no_measure_is_ever_negative_or_infinite_and_that_by_similarity_is_never_unknown(seed, n, each):
    context = context_of(*rows(seed, n=n, each=each))
    for each_measure in (similarity, relative, relative_rows, advantage):
        found = each_measure(context)
        assert found.shape == (len(context.external),)
        assert bool((found.isnan() | (found.isfinite() & (found >= 0))).all())
        assert each_measure is not similarity or not bool(found.isnan().any())
