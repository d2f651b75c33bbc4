"""DPS against oracles that share no code with it: NumPy, SciPy's entropies and numerical integration."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor

from dase_grpc.dps_config import DIVERGENCES, Divergence
from dase_grpc.errors import ConfigError
from dase_grpc.learning import divergences, dps
from dase_grpc.learning.dps import DpsOptions, divergence, similarity_weights
from dase_grpc.learning.moments import moments

MEASURED = ("jeffreys", "js", "kl")
OWN, OTHER = 0, 1
JS_ERROR = 3e-3

quick = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 6)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- oracles ----------------------------------------------------------------------------------------------


def kl_oracle(mean_p, cov_p, mean_q, cov_q) -> float:
    """KL(p‖q) as cross-entropy minus entropy, the entropy by SciPy."""
    shift = mean_p - mean_q
    quadratic = np.trace(np.linalg.solve(cov_q, cov_p)) + shift @ np.linalg.solve(cov_q, shift)
    cross = (len(mean_p) * math.log(2 * math.pi) + np.linalg.slogdet(cov_q)[1] + quadratic) / 2
    return float(cross - stats.multivariate_normal(mean_p, cov_p).entropy())


def jeffreys_oracle(mean, cov, variance) -> float:
    origin, reference = np.zeros(len(mean)), variance * np.eye(len(mean))
    return (kl_oracle(mean, cov, origin, reference) + kl_oracle(origin, reference, mean, cov)) / 2


def js_integrand(p, q):
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(p > 0, p * np.log(p / middle), 0.0)
        right = np.where(q > 0, q * np.log(q / middle), 0.0)
    return (left + right) / 2


def gaussian(seed: int, n: int, *, spread: float = 1.0, shift: float = 1.0):
    """A mean and a well-conditioned covariance at the scale of the default reference."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((n, n + 4))
    mean = rng.standard_normal(n) * shift * math.sqrt(0.1)
    return mean, 0.1 * spread * (0.7 * root @ root.T / (n + 4) + 0.3 * np.eye(n))


def rotation(seed: int, n: int):
    return stats.ortho_group.rvs(n, random_state=seed) if n > 1 else np.array([[-1.0]])


def rows(seed: int, *, external: int, internal: int = 5, n: int = 3, noise: float = 0.2):
    """Actions, policy actions and agent ids in a shuffled order, float32 as in a batch."""
    rng = np.random.default_rng(seed)
    size = external + internal
    policy = rng.uniform(-0.7, 0.7, (size, n))
    actions = (policy + noise * rng.standard_normal((size, n))).clip(-1, 1)
    ids = np.repeat([OTHER, OWN], [external, internal]).astype(np.int32)
    rng.shuffle(ids)
    return actions.astype(np.float32), policy.astype(np.float32), ids


def external_weight(weights: Tensor, ids) -> float:
    """The one weight that all external rows share; all others must be exactly 1."""
    outside = torch.as_tensor(ids) != OWN
    assert bool((weights[~outside] == 1).all())
    assert len(weights[outside].unique()) == 1
    return float(weights[outside][0])


# --- the divergences --------------------------------------------------------------------------------------


@quick
@given(seeds, sizes, st.floats(0.1, 5.0), st.floats(0.0, 2.0), st.floats(0.01, 2.0))
def test_jeffreys_is_half_the_sum_of_both_kl_divergences(seed, n, spread, shift, variance):
    mean, cov = gaussian(seed, n, spread=spread, shift=shift)
    expected = jeffreys_oracle(mean, cov, variance)
    assert float(divergence(mean, cov, variance, "jeffreys")) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@quick
@given(seeds, sizes, st.floats(0.1, 5.0), st.floats(0.0, 2.0), st.floats(0.01, 2.0))
def test_kl_goes_from_the_deviations_to_the_reference(seed, n, spread, shift, variance):
    mean, cov = gaussian(seed, n, spread=spread, shift=shift)
    expected = kl_oracle(mean, cov, np.zeros(n), variance * np.eye(n))
    assert float(divergence(mean, cov, variance, "kl")) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@quick
@given(seeds, sizes, st.floats(0.1, 5.0), st.floats(0.0, 2.0))
def test_the_two_terms_follow_their_equations_and_sum_to_jeffreys(seed, n, spread, shift):
    mean, cov = gaussian(seed, n, spread=spread, shift=shift)
    precision, variance = np.linalg.inv(cov), 0.1
    estimate = divergences.relative_gaussian(torch.as_tensor(mean), torch.as_tensor(cov), variance)
    covariance_part = (np.trace(cov) / variance + variance * np.trace(precision) - 2 * n) / 4
    mean_part = mean @ (np.eye(n) / variance + precision) @ mean / 4
    assert float(divergences.covariance_term(estimate)) == pytest.approx(covariance_part, rel=1e-9, abs=1e-12)
    assert float(divergences.mean_term(estimate)) == pytest.approx(mean_part, rel=1e-9, abs=1e-12)
    assert float(divergences.jeffreys(estimate)) == pytest.approx(covariance_part + mean_part, rel=1e-9)


@pytest.mark.parametrize(
    ("mean", "variance"), [(0.0, 0.01), (0.0, 0.1), (0.05, 0.12), (0.3, 0.1), (0.6, 0.03), (0.1, 0.9)]
)
def test_js_agrees_with_numerical_integration_in_one_dimension(mean, variance):
    p, q = stats.norm(mean, math.sqrt(variance)), stats.norm(0, math.sqrt(0.1))
    edge = 12 * math.sqrt(max(variance, 0.1)) + abs(mean)
    expected, _ = integrate.quad(
        lambda x: float(js_integrand(p.pdf(x), q.pdf(x))), -edge, edge, points=[0, mean], limit=200
    )
    assert float(divergence([mean], [[variance]], 0.1, "js")) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("seed", range(4))
def test_js_agrees_with_numerical_integration_in_two_dimensions(seed):
    mean, cov = gaussian(seed, 2, spread=[0.2, 0.6, 1.5, 4.0][seed], shift=0.5)
    edge = 9 * math.sqrt(max(np.linalg.eigvalsh(cov).max(), 0.1)) + np.abs(mean).max()
    axis = np.linspace(-edge, edge, 601)
    points = np.stack(np.meshgrid(axis, axis), axis=-1)
    density = js_integrand(
        stats.multivariate_normal(mean, cov).pdf(points),
        stats.multivariate_normal([0, 0], 0.1 * np.eye(2)).pdf(points),
    )
    expected = integrate.trapezoid(integrate.trapezoid(density, axis), axis)
    assert float(divergence(mean, cov, 0.1, "js")) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("n", [6, 17])
def test_js_agrees_with_a_large_plain_monte_carlo_sample(n):
    mean, cov = gaussian(n, n, spread=0.9, shift=0.2)
    p = stats.multivariate_normal(mean, cov)
    q = stats.multivariate_normal(np.zeros(n), 0.1 * np.eye(n))
    kl_to_middle = []
    for one, other in ((p, q), (q, p)):
        x = one.rvs(100_000, random_state=1)
        kl_to_middle.append(
            np.mean(one.logpdf(x) - np.logaddexp(one.logpdf(x), other.logpdf(x))) + math.log(2)
        )
    assert float(divergence(mean, cov, 0.1, "js")) == pytest.approx(np.mean(kl_to_middle), abs=5e-3)


@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize("n", [1, 2, 6, 17])
def test_rho_is_zero_for_the_reference_itself(kind, n):
    rho = divergence(np.zeros(n), 0.1 * np.eye(n), 0.1, kind)
    assert rho.shape == ()
    assert rho.dtype == torch.float64
    assert 0 <= float(rho) < 1e-14


@pytest.mark.parametrize("kind", MEASURED)
@quick
@given(seed=seeds, n=sizes)
def test_rho_is_positive_for_any_other_gaussian(kind, seed, n):
    mean, cov = gaussian(seed, n)
    assert float(divergence(mean, cov, 0.1, kind)) > 0


@pytest.mark.parametrize("kind", ["jeffreys", "kl"])
def test_similarity_vanishes_for_far_policies(kind):
    for mean, variance in ((2.0, 0.001), (1.9, 0.05)):
        rho = divergence([mean] * 3, variance * np.eye(3), 0.1, kind)
        assert math.exp(-float(rho)) < 1e-12


def test_true_js_is_never_above_ln_2_so_its_similarity_never_below_one_half():
    for mean in (0.0, 0.5, 2.0, 1e3, 1e100):
        for variance in (1e-12, 0.01, 0.1, 4.0, 1e12):
            rho = float(divergence([mean] * 2, variance * np.eye(2), 0.1, "js"))
            assert 0 <= rho <= math.log(2)
    assert float(divergence([2.0] * 6, 0.01 * np.eye(6), 0.1, "js")) == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("kind", MEASURED)
@quick
@given(seed=seeds, n=sizes, scale=st.floats(1e-3, 1e3))
def test_rho_does_not_depend_on_the_unit_of_the_actions(kind, seed, n, scale):
    mean, cov = gaussian(seed, n)
    here = float(divergence(mean, cov, 0.1, kind))
    there = float(divergence(scale * mean, scale**2 * cov, 0.1 * scale**2, kind))
    assert there == pytest.approx(here, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("kind", "error"), [("jeffreys", 1e-9), ("kl", 1e-9), ("js", JS_ERROR)])
@quick
@given(seed=seeds, n=sizes)
def test_rho_does_not_depend_on_the_directions_of_the_axes(kind, error, seed, n):
    mean, cov = gaussian(seed, n, shift=0.5)
    turn = rotation(seed, n)
    here = float(divergence(mean, cov, 0.1, kind))
    there = float(divergence(turn @ mean, turn @ cov @ turn.T, 0.1, kind))
    assert there == pytest.approx(here, rel=error, abs=2 * error)


@pytest.mark.parametrize("kind", MEASURED)
def test_a_batch_of_gaussians_gives_what_each_gives_alone(kind):
    pairs = [gaussian(seed, 4) for seed in range(3)]
    means, covs = (np.stack(part) for part in zip(*pairs, strict=True))
    together = divergence(means, covs, 0.1, kind)
    alone = [float(divergence(mean, cov, 0.1, kind)) for mean, cov in pairs]
    np.testing.assert_allclose(together.numpy(), alone, rtol=1e-12)


@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize(
    "cov",
    [
        [[0.1, 0.0], [0.0, 0.0]],
        [[0.0, 0.0], [0.0, 0.0]],
        [[0.1, 0.1], [0.1, 0.1]],
        [[0.1, 0.2], [0.2, 0.1]],
        [[-0.1, 0.0], [0.0, 0.1]],
        [[math.nan, 0.0], [0.0, 0.1]],
        [[math.inf, 0.0], [0.0, 0.1]],
        [[1e308, 0.0], [0.0, 0.1]],
    ],
)
def test_rho_is_infinite_for_a_covariance_that_cannot_be_used(kind, cov):
    assert float(divergence([0.0, 0.0], cov, 0.01, kind)) == math.inf


def test_rho_is_infinite_where_float64_overflows_and_never_nan():
    for kind in ("jeffreys", "kl"):
        assert float(divergence([1e200], [[0.1]], 0.1, kind)) == math.inf
        assert float(divergence([math.nan], [[0.1]], 0.1, kind)) == math.inf
    assert float(divergence([0.0], [[1e-320]], 0.1, "jeffreys")) == math.inf


def test_none_ignores_the_gaussians_and_isolated_trusts_nobody():
    assert float(divergence([9.0], [[0.0]], 0.1, "none")) == 0
    assert float(divergence([0.0], [[0.1]], 0.1, "isolated")) == math.inf


def test_js_is_deterministic_and_leaves_the_global_random_state_alone():
    mean, cov = gaussian(3, 5)
    state = torch.random.get_rng_state()
    first = divergence(mean, cov, 0.1, "js")
    divergences._samples.clear()
    torch.manual_seed(99)
    expected_state = torch.random.get_rng_state()
    assert torch.equal(first, divergence(mean, cov, 0.1, "js"))
    assert torch.equal(expected_state, torch.random.get_rng_state())
    torch.random.set_rng_state(state)


@pytest.mark.parametrize("n", [1, 6, 17])
def test_the_fixed_sample_is_finite_and_standard_normal(n):
    sample = divergences.standard_normal(n, divergences.SAMPLES, torch.device("cpu"))
    assert sample.dtype == torch.float64
    assert sample.isfinite().all()
    assert sample.mean(0).abs().max() < 0.01
    assert (torch.cov(sample.T).reshape(n, n) - torch.eye(n)).abs().max() < 0.1


# --- the moments ------------------------------------------------------------------------------------------


@quick
@given(seeds, sizes, st.integers(2, 40))
def test_moments_agree_with_numpy_for_each_group(seed, n, size):
    rng = np.random.default_rng(seed)
    deviation = rng.uniform(-2, 2, (size, n))
    member = rng.random((3, size)) < 0.6
    mean, cov, count = moments(torch.as_tensor(deviation), torch.as_tensor(member))
    assert count.tolist() == member.sum(1).tolist()
    for group, chosen in enumerate(member):
        if chosen.sum() > 1:
            part = deviation[chosen]
            np.testing.assert_allclose(mean[group], part.mean(0), rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(
                cov[group], np.cov(part, rowvar=False).reshape(n, n), rtol=1e-10, atol=1e-13
            )


def test_moments_keep_their_digits_when_the_mean_is_far_from_zero():
    offset = torch.tensor([[1e6]], dtype=torch.float64)
    deviation = offset + torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
    mean, cov, _ = moments(deviation, torch.ones(1, 3, dtype=torch.bool))
    assert float(mean[0, 0]) == 1e6
    assert float(cov[0, 0, 0]) == 1.0


@quick
@given(st.floats(-2, 2, width=32), st.integers(1, 300))
def test_a_constant_deviation_has_exactly_no_variance(value, size):
    deviation = torch.full((size, 1), value, dtype=torch.float64)
    _, cov, _ = moments(deviation, torch.ones(1, size, dtype=torch.bool))
    assert float(cov[0, 0, 0]) == 0


def test_rows_outside_a_group_do_not_touch_it_even_if_they_are_nan():
    deviation = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    clean = dps.measure(deviation[:12], torch.ones(1, 12, dtype=torch.bool), DpsOptions())
    deviation[12:] = math.nan
    member = (torch.arange(20) < 12)[None]
    dirty = dps.measure(deviation, member, DpsOptions())
    torch.testing.assert_close(dirty.rho, clean.rho, rtol=1e-12, atol=0)


# --- the weights ------------------------------------------------------------------------------------------


@quick
@given(seeds, sizes, st.integers(12, 60))
def test_weights_are_exp_of_minus_the_jeffreys_divergence_of_the_external_deviations(seed, n, external):
    actions, policy, ids = rows(seed, external=external, n=n)
    deviation = (actions.astype(np.float64) - policy.astype(np.float64))[ids != OWN]
    cov = np.cov(deviation, rowvar=False).reshape(n, n)
    expected = math.exp(-jeffreys_oracle(deviation.mean(0), cov, 0.1))
    weights = similarity_weights(actions, policy, ids, OWN)
    assert weights.dtype == torch.float32
    assert external_weight(weights, ids) == pytest.approx(expected, rel=1e-5)


def test_the_authors_weights_differ_only_by_their_divisor_when_actions_are_within_one():
    """The released code's equations, by torch's own distributions: covariance over |B_E|."""
    actions, policy, ids = (torch.as_tensor(part) for part in rows(18, external=60))
    deviation = (actions.double() - policy.double())[ids != OWN]
    mean = deviation.mean(0)
    theirs = (deviation - mean).T @ (deviation - mean) / len(deviation)
    p = torch.distributions.MultivariateNormal(mean, theirs)
    q = torch.distributions.MultivariateNormal(torch.zeros(3).double(), 0.1 * torch.eye(3).double())
    both = torch.distributions.kl_divergence(p, q) + torch.distributions.kl_divergence(q, p)
    assert float(divergence(mean, theirs, 0.1, "jeffreys")) == pytest.approx(float(both) / 2, rel=1e-9)
    ours = divergence(mean, theirs * 60 / 59, 0.1, "jeffreys")
    weight = external_weight(similarity_weights(actions, policy, ids, OWN), ids)
    assert weight == pytest.approx(math.exp(-float(ours)), rel=1e-6)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_internal_rows_weigh_exactly_one_and_external_ones_between_zero_and_one(kind):
    for seed in range(5):
        actions, policy, ids = rows(seed, external=30)
        weight = external_weight(similarity_weights(actions, policy, ids, OWN, divergence=kind), ids)
        assert 0 <= weight <= 1


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_without_external_rows_every_weight_is_one(kind):
    actions, policy, ids = rows(0, external=0, internal=8)
    assert similarity_weights(actions, policy, ids, OWN, divergence=kind).tolist() == [1.0] * 8


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_an_empty_batch_has_no_weights(kind):
    assert similarity_weights(np.zeros((0, 2)), np.zeros((0, 2)), [], OWN, divergence=kind).shape == (0,)


@pytest.mark.parametrize("kind", MEASURED)
def test_without_internal_rows_every_row_has_the_same_similarity(kind):
    actions, policy, _ = rows(1, external=40, internal=0)
    weights = similarity_weights(actions, policy, np.full(40, OTHER), OWN, divergence=kind)
    assert len(weights.unique()) == 1
    assert 0 < float(weights[0]) < 1


@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize("n", [1, 3, 17])
def test_up_to_n_plus_one_external_rows_weigh_nothing(kind, n):
    for external in (1, n, n + 1):
        actions, policy, ids = rows(2, external=external, n=n)
        assert external_weight(similarity_weights(actions, policy, ids, OWN, divergence=kind), ids) == 0


@pytest.mark.parametrize("n", [1, 3, 17])
def test_from_n_plus_two_external_rows_on_the_similarity_is_measured(n):
    actions, policy, ids = rows(3, external=n + 2, n=n)
    external = torch.as_tensor(ids != OWN)[None]
    measured = dps.measure(dps.deviations(actions, policy), external, DpsOptions())
    assert not measured.degenerate[0]
    assert measured.rho.isfinite()[0]


@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize("value", [0.0, 0.1, -0.3, 2.0])
def test_a_dimension_with_one_constant_deviation_weighs_nothing(kind, value):
    actions, policy, ids = rows(4, external=37)
    policy[:, 1] = -1.0
    actions[:, 1] = np.float32(value) - 1
    assert external_weight(similarity_weights(actions, policy, ids, OWN, divergence=kind), ids) == 0


@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize(("taken", "wanted"), [(1, 1), (-1, -1), (1, -1)])
def test_actions_saturated_at_a_bound_in_one_dimension_weigh_nothing(kind, taken, wanted):
    actions, policy, ids = rows(5, external=30)
    actions[:, 0], policy[:, 0] = taken, wanted
    assert external_weight(similarity_weights(actions, policy, ids, OWN, divergence=kind), ids) == 0


@pytest.mark.parametrize("kind", MEASURED)
@quick
@given(seed=seeds, factor=st.floats(-1, 1).filter(lambda x: abs(x) > 0.01))
def test_linearly_dependent_dimensions_weigh_nothing(kind, seed, factor):
    deviation = np.random.default_rng(seed).uniform(-1, 1, (32, 3))
    deviation[:, 2] = factor * deviation[:, 0]
    weights = similarity_weights(deviation, np.zeros((32, 3)), [OTHER] * 32, OWN, divergence=kind)
    assert weights.tolist() == [0.0] * 32


@pytest.mark.parametrize("kind", MEASURED)
def test_copies_of_one_transition_weigh_nothing(kind):
    actions, policy = np.tile([[0.3, -0.2]], (50, 1)), np.tile([[0.1, 0.1]], (50, 1))
    weights = similarity_weights(actions, policy, [OTHER] * 50, OWN, divergence=kind)
    assert weights.tolist() == [0.0] * 50


@pytest.mark.parametrize("kind", MEASURED)
def test_doubling_every_row_only_changes_the_divisor(kind):
    actions, policy, ids = rows(6, external=40, internal=0)
    deviation = actions.astype(np.float64) - policy
    cov = np.cov(deviation, rowvar=False) * (2 * 39) / 79
    expected = math.exp(-float(divergence(deviation.mean(0), cov, 0.1, kind)))
    doubled = similarity_weights(
        np.tile(actions, (2, 1)), np.tile(policy, (2, 1)), np.tile(ids, 2), OWN, divergence=kind
    )
    assert float(doubled[0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize("where", ["actions", "policy"])
def test_an_external_action_that_is_not_finite_weighs_nothing_instead_of_nan(kind, where):
    actions, policy, ids = rows(7, external=30)
    broken = actions if where == "actions" else policy
    broken[np.flatnonzero(ids != OWN)[3], 1] = np.nan
    assert external_weight(similarity_weights(actions, policy, ids, OWN, divergence=kind), ids) == 0


def test_none_weighs_external_rows_fully_however_few_and_isolated_never():
    actions, policy, ids = rows(8, external=1)
    assert external_weight(similarity_weights(actions, policy, ids, OWN, divergence="none"), ids) == 1
    assert external_weight(similarity_weights(actions, policy, ids, OWN, divergence="isolated"), ids) == 0


@pytest.mark.parametrize("kind", MEASURED)
@quick
@given(seed=seeds)
def test_the_order_of_the_rows_does_not_matter(kind, seed):
    actions, policy, ids = rows(seed, external=25)
    order = np.random.default_rng(seed).permutation(len(ids))
    here = similarity_weights(actions, policy, ids, OWN, divergence=kind)
    there = similarity_weights(actions[order], policy[order], ids[order], OWN, divergence=kind)
    torch.testing.assert_close(here[torch.as_tensor(order)], there, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("kind", "error"), [("jeffreys", 1e-6), ("kl", 1e-6), ("js", 2 * JS_ERROR)])
def test_the_order_of_the_action_dimensions_does_not_matter(kind, error):
    actions, policy, ids = rows(9, external=60, n=6)
    order = [3, 0, 5, 1, 4, 2]
    here = similarity_weights(actions, policy, ids, OWN, divergence=kind)
    there = similarity_weights(actions[:, order], policy[:, order], ids, OWN, divergence=kind)
    torch.testing.assert_close(here, there, rtol=error, atol=0)


@pytest.mark.parametrize("convert", [np.asarray, np.ndarray.tolist, torch.as_tensor])
def test_arrays_lists_and_tensors_give_the_same_weights(convert: Callable):
    actions, policy, ids = rows(10, external=30)
    expected = similarity_weights(
        torch.as_tensor(actions), torch.as_tensor(policy), torch.as_tensor(ids), OWN
    )
    assert torch.equal(expected, similarity_weights(convert(actions), convert(policy), convert(ids), OWN))


def test_float64_inputs_give_the_same_weights_as_the_same_values_in_float32():
    actions, policy, ids = rows(11, external=30)
    wide = similarity_weights(actions.astype(np.float64), policy.astype(np.float64), ids, OWN)
    assert torch.equal(wide, similarity_weights(actions, policy, ids, OWN))


def test_lists_of_python_floats_keep_their_double_precision():
    mean, cov = gaussian(19, 3)
    expected = divergence(mean, cov, 0.1, "jeffreys")
    assert torch.equal(divergence(mean.tolist(), cov.tolist(), 0.1, "jeffreys"), expected)


def test_half_precision_inputs_are_measured_in_float64():
    actions, policy, ids = rows(12, external=30)
    half = torch.as_tensor(actions).half(), torch.as_tensor(policy).bfloat16()
    expected = similarity_weights(half[0].double(), half[1].double(), ids, OWN)
    assert torch.equal(expected, similarity_weights(*half, ids, OWN))


def test_weights_carry_no_gradient_and_inputs_are_left_alone():
    actions, policy, ids = rows(13, external=30)
    wanted = torch.as_tensor(policy).clone().requires_grad_()
    weights = similarity_weights(torch.as_tensor(actions), wanted, ids, OWN)
    assert not weights.requires_grad
    assert torch.equal(wanted.detach(), torch.as_tensor(policy))


def test_all_other_agents_are_pooled_into_one_similarity():
    actions, policy, ids = rows(14, external=40)
    several = np.where(ids == OWN, OWN, np.arange(len(ids)) % 7 + 1)
    assert torch.equal(
        similarity_weights(actions, policy, ids, OWN), similarity_weights(actions, policy, several, OWN)
    )


def test_seventeen_action_dimensions_are_measured():
    actions, policy, ids = rows(15, external=200, n=17, noise=0.3)
    assert 0 < external_weight(similarity_weights(actions, policy, ids, OWN), ids) < 1


def test_agreement_beyond_the_reference_lowers_the_weight():
    """λ is 1 when the deviations look like the reference, not when the policies agree."""
    rng = np.random.default_rng(16)
    noise = rng.standard_normal((2000, 3))
    ids, policy = [OTHER] * 2000, np.zeros((2000, 3))
    at_reference = similarity_weights(math.sqrt(0.1) * noise, policy, ids, OWN)[0]
    closer = similarity_weights(0.1 * noise, policy, ids, OWN)[0]
    assert float(at_reference) > 0.99
    assert float(closer) < 0.01


# --- promises ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_weights_never_synchronise_with_the_host(kind, monkeypatch):
    actions, policy, ids = (torch.as_tensor(part) for part in rows(17, external=30))
    similarity_weights(actions, policy, ids, OWN, divergence=kind)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("read a tensor's value")

    for name in (
        *("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"),
        *("__array__", "__iter__", "__contains__"),
    ):
        monkeypatch.setattr(Tensor, name, refuse)
    similarity_weights(actions, policy, ids, OWN, divergence=kind)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_one_graph_holds_the_whole_computation(kind):
    """No data-dependent branch or shape: the tracer needs a single graph and it gives the same numbers."""
    deviation = torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    member = (torch.arange(30) % 3 > 0)[None]

    def run(deviation: Tensor, member: Tensor) -> tuple[Tensor, ...]:
        found = dps.measure(deviation, member, DpsOptions(divergence=kind))
        return found.similarity, found.rho, found.covariance_term, found.mean_term, found.degenerate

    eager = run(deviation, member)
    compiled = torch.compile(run, backend="eager", fullgraph=True)(deviation, member)
    for expected, found in zip(eager, compiled, strict=True):
        torch.testing.assert_close(found, expected)


def test_every_configured_divergence_is_computed():
    assert set(divergences.EQUATIONS) | {"none", "isolated"} == set(get_args(Divergence))


@pytest.mark.parametrize("kind", ["", "Jeffreys", "wasserstein"])
def test_an_unknown_divergence_is_refused_with_the_allowed_ones(kind):
    with pytest.raises(ConfigError, match="use one of jeffreys, js, kl, none, isolated"):
        similarity_weights([[0.0]], [[0.0]], [0], OWN, divergence=kind)
    with pytest.raises(ConfigError, match="use one of jeffreys, js, kl, none, isolated"):
        divergence([0.0], [[0.1]], 0.1, kind)


@pytest.mark.parametrize("scope", ["Agent", "row", ""])
def test_an_unknown_scope_is_refused_with_the_allowed_ones(scope):
    with pytest.raises(ConfigError, match="use one of pooled, agent, transition"):
        similarity_weights([[0.0]], [[0.0]], [0], OWN, scope=scope)


@pytest.mark.parametrize("variance", [0.0, -0.1, math.inf, math.nan])
def test_a_reference_variance_that_is_not_positive_is_refused(variance):
    with pytest.raises(ConfigError, match="must be positive and finite"):
        similarity_weights([[0.0]], [[0.0]], [0], OWN, reference_variance=variance)


def test_shapes_that_do_not_fit_are_refused_instead_of_broadcast():
    with pytest.raises(ValueError, match=r"must both be \(b, n\)"):
        similarity_weights(np.zeros((4, 2)), np.zeros((4, 1)), [0] * 4, OWN)
    with pytest.raises(ValueError, match=r"must both be \(b, n\)"):
        similarity_weights(np.zeros(4), np.zeros(4), [0] * 4, OWN)
    with pytest.raises(ValueError, match="need as many agent ids"):
        similarity_weights(np.zeros((4, 2)), np.zeros((4, 2)), [0] * 3, OWN)


def test_the_documented_table_is_what_the_example_prints(capsys):
    root = Path(__file__).parents[2]
    runpy.run_path(str(root / "examples/similarity_of_identical_policies.py"), run_name="__main__")
    assert capsys.readouterr().out in (root / "docs/dps.md").read_text(encoding="utf-8")
