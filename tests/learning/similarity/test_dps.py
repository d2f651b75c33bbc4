"""DPS against oracles that share no code with it: NumPy, SciPy's entropies and numerical integration."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning.gaussians import JS_ERROR, MEASURED, gaussian, jeffreys_oracle, quick, seeds, sizes
from torch import Tensor

from dase_grpc.config.algorithms import DIVERGENCES, Divergence, DpsConfig
from dase_grpc.errors import ConfigError
from dase_grpc.learning.similarity import divergences, measure
from dase_grpc.learning.similarity.measure import divergence, similarity_weights

OWN, OTHER = 0, 1


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


@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize("value", [0.0, 0.1, -0.3, 2.0])
def test_a_dimension_with_one_constant_deviation_weighs_nothing(kind, value):
    actions, policy, ids = rows(4, external=37)
    policy[:, 1] = -1.0
    actions[:, 1] = np.float32(value) - 1
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
def test_weights_never_synchronise_with_the_host(kind, unread):
    actions, policy, ids = (torch.as_tensor(part) for part in rows(17, external=30))
    similarity_weights(actions, policy, ids, OWN, divergence=kind)

    with unread():
        similarity_weights(actions, policy, ids, OWN, divergence=kind)


EVERYTHING = {"floor": True, "shrinkage": 0.2, "debias": True, "normalise": True}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in DIVERGENCES), ("jeffreys", EVERYTHING)])
def test_one_graph_holds_the_whole_computation(kind, more):
    """No data-dependent branch or shape: the tracer needs a single graph and it gives the same numbers."""
    deviation = torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    member = (torch.arange(30) % 3 > 0)[None]

    options = DpsConfig(divergence=kind, **more)

    def run(deviation: Tensor, member: Tensor) -> tuple[Tensor, ...]:
        found = measure.measure(deviation, member, options)
        return found.similarity, found.rho, found.covariance_term, found.mean_term, found.degenerate

    eager = run(deviation, member)
    compiled = torch.compile(run, backend="eager", fullgraph=True)(deviation, member)
    for expected, found in zip(eager, compiled, strict=True):
        torch.testing.assert_close(found, expected)


def test_every_configured_divergence_is_computed():
    assert set(divergences.EQUATIONS) | {"none", "isolated"} == set(get_args(Divergence))


@pytest.mark.parametrize(
    ("option", "values", "words"),
    [
        ("divergence", ["", "Jeffreys", "wasserstein"], "'jeffreys', 'js', 'kl', 'none' or 'isolated'"),
        ("scope", ["Agent", "row", ""], "'pooled', 'agent' or 'transition'"),
        ("reference_variance", [0.0, -0.1, math.inf, math.nan], r"(greater than 0|finite)"),
        ("shrinkage", [-0.1, 1.1, math.nan], "(at least 0|at most 1|finite)"),
    ],
)
def test_an_option_that_is_unknown_or_out_of_range_is_refused_with_what_is_allowed(option, values, words):
    for value in values:
        with pytest.raises(ConfigError, match=rf"{option} = .*must be {words}"):
            similarity_weights([[0.0]], [[0.0]], [0], OWN, **{option: value})
    with pytest.raises(ConfigError, match="must be 'jeffreys', 'js', 'kl', 'none' or 'isolated'"):
        divergence([0.0], [[0.1]], 0.1, "Jeffreys")


def test_shapes_that_do_not_fit_are_refused_instead_of_broadcast():
    with pytest.raises(ValueError, match=r"must both be \(b, n\)"):
        similarity_weights(np.zeros((4, 2)), np.zeros((4, 1)), [0] * 4, OWN)
    with pytest.raises(ValueError, match=r"must both be \(b, n\)"):
        similarity_weights(np.zeros(4), np.zeros(4), [0] * 4, OWN)
    with pytest.raises(ValueError, match="need as many agent ids"):
        similarity_weights(np.zeros((4, 2)), np.zeros((4, 2)), [0] * 3, OWN)


def test_the_documented_table_is_what_the_example_prints(capsys):
    root = Path(__file__).parents[3]
    runpy.run_path(str(root / "examples/similarity_of_identical_policies.py"), run_name="__main__")
    assert capsys.readouterr().out in (root / "docs/dps.md").read_text(encoding="utf-8")
