"""The divergences and moments against NumPy, SciPy's entropies and numerical integration."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning.gaussians import JS_ERROR, MEASURED, gaussian, jeffreys_oracle, kl_oracle, quick, seeds, sizes
from scipy import integrate, stats

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.learning.similarity import divergences, measure
from dase_grpc.learning.similarity.measure import divergence
from dase_grpc.learning.similarity.moments import moments


def js_integrand(p, q):
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(p > 0, p * np.log(p / middle), 0.0)
        right = np.where(q > 0, q * np.log(q / middle), 0.0)
    return (left + right) / 2


def rotation(seed: int, n: int):
    return stats.ortho_group.rvs(n, random_state=seed) if n > 1 else np.array([[-1.0]])


# --- the divergences --------------------------------------------------------------------------------------


@quick
@given(seeds, sizes, st.floats(0.1, 5.0), st.floats(0.0, 2.0), st.floats(0.01, 2.0))
def test_kl_goes_to_the_reference_and_jeffreys_is_half_the_sum_of_both(seed, n, spread, shift, variance):
    mean, cov = gaussian(seed, n, spread=spread, shift=shift)
    expected = kl_oracle(mean, cov, np.zeros(n), variance * np.eye(n))
    assert float(divergence(mean, cov, variance, "kl")) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    expected = jeffreys_oracle(mean, cov, variance)
    assert float(divergence(mean, cov, variance, "jeffreys")) == pytest.approx(expected, rel=1e-9, abs=1e-12)


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
    clean = measure.measure(deviation[:12], torch.ones(1, 12, dtype=torch.bool), DpsConfig())
    deviation[12:] = math.nan
    member = (torch.arange(20) < 12)[None]
    dirty = measure.measure(deviation, member, DpsConfig())
    torch.testing.assert_close(dirty.rho, clean.rho, rtol=1e-12, atol=0)
