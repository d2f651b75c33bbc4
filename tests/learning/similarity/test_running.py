"""Running moments across batches against explicit weighted sums over the whole history, in NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning.gaussians import jeffreys_oracle, seeds, sizes
from learning.peer_rows import batch_of

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.config.resolve import resolve
from dase_grpc.errors import ConfigError
from dase_grpc.learning.similarity.moments import RunningMoments, moments
from dase_grpc.learning.similarity.weigher import SimilarityWeigher

CPU = torch.device("cpu")
OWN, R = 0, 0.1


def running(groups: int, size: int, half_life: float) -> RunningMoments:
    return RunningMoments.empty(groups, size, half_life=half_life, device=CPU)


def history_oracle(batches, group, half_life):
    """Mean, covariance and effective rows of all rows so far, each with its weight, by NumPy."""
    rows, weights = [], []
    for age, (deviation, member) in enumerate(reversed(batches)):
        rows.append(deviation[member[group]])
        weights.append(np.full(member[group].sum(), 0.5 ** (age / half_life)))
    values, weight = np.concatenate(rows), np.concatenate(weights)
    mean = np.average(values, axis=0, weights=weight)
    cov = np.cov(values, rowvar=False, aweights=weight).reshape(values.shape[1], values.shape[1])
    return mean, cov, weight.sum() ** 2 / (weight**2).sum()


@settings(max_examples=40)
@given(
    seed=seeds,
    n=sizes,
    groups=st.integers(1, 4),
    half_life=st.floats(0.3, 100),
    updates=st.integers(1, 30),
    most=st.integers(2, 20),
)
def test_the_moments_are_the_weighted_ones_of_all_rows(seed, n, groups, half_life, updates, most):
    rng = np.random.default_rng(seed)
    subject, batches = running(groups, n, half_life), []
    for _ in range(updates):
        size = int(rng.integers(1, most))
        deviation = rng.normal(rng.normal(), 0.3, (size, n))
        member = rng.random((groups, size)) < 0.6
        batches.append((deviation, member))
        subject.take(torch.tensor(deviation), torch.tensor(member))
    mean, cov, rows = (part.numpy() for part in subject.moments())
    for group in range(groups):
        if sum(member[group].sum() for _, member in batches) < 2:
            continue
        expected = history_oracle(batches, group, half_life)
        for found, wanted in zip((mean[group], cov[group], rows[group]), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9)


def test_after_one_batch_they_are_the_moments_of_that_batch():
    deviation, member = torch.randn(12, 3, dtype=torch.float64), torch.rand(2, 12) < 0.7
    subject = running(2, 3, 7.0)
    subject.take(deviation, member)
    for found, expected in zip(subject.moments(), moments(deviation, member), strict=True):
        torch.testing.assert_close(found, expected.double(), rtol=1e-14, atol=0)


def test_the_effective_rows_approach_a_multiple_of_those_in_a_batch():
    subject = running(1, 2, 10.0)
    for _ in range(400):
        subject.take(torch.randn(7, 2, dtype=torch.float64), torch.ones(1, 7, dtype=torch.bool))
    decay = 0.5**0.1
    assert float(subject.moments()[2]) == pytest.approx(7 * (1 + decay) / (1 - decay), rel=1e-6)
    assert float(subject.moments()[2]) == pytest.approx(7 * 2.885 * 10, rel=1e-2)


def test_a_group_without_rows_keeps_its_moments_and_only_ages():
    subject, some = running(1, 2, 3.0), torch.ones(1, 9, dtype=torch.bool)
    subject.take(torch.randn(9, 2, dtype=torch.float64), some)
    before = subject.moments()
    for _ in range(5):
        subject.take(torch.randn(9, 2, dtype=torch.float64), ~some)
    for found, expected in zip(subject.moments(), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_group_that_was_never_seen_and_one_long_forgotten_have_no_rows():
    subject, some = running(2, 2, 0.5), torch.tensor([[True] * 5, [False] * 5])
    subject.take(torch.randn(5, 2, dtype=torch.float64), some)
    for _ in range(2_000):
        subject.take(torch.zeros(5, 2, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.bool))
    mean, cov, rows = subject.moments()
    assert rows.tolist() == [0.0, 0.0]
    assert cov.abs().max() == 0
    assert not mean.isnan().any()
    fresh = torch.randn(5, 2, dtype=torch.float64)
    subject.take(fresh, some)
    torch.testing.assert_close(subject.moments()[1][0], fresh.mT.cov(), rtol=1e-9, atol=1e-12)


def test_a_dimension_that_never_varied_has_exactly_no_variance():
    subject = running(1, 2, 4.0)
    for _ in range(30):
        deviation = torch.randn(11, 2, dtype=torch.float64)
        deviation[:, 1] = 0.1 + 0.2
        subject.take(deviation, torch.ones(1, 11, dtype=torch.bool))
    assert subject.moments()[1][0, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_never_enter(bad):
    subject, all_rows = running(1, 2, 4.0), torch.ones(1, 6, dtype=torch.bool)
    subject.take(torch.randn(6, 2, dtype=torch.float64), all_rows)
    before = subject.moments()
    broken = torch.randn(6, 2, dtype=torch.float64)
    broken[3, 0] = bad
    subject.take(broken, all_rows)
    for found, expected in zip(subject.moments(), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


# --- the weigher ------------------------------------------------------------------------------------------


def batches(count: int, *, agents: int = 10, size: int = 64, n: int = 6, seed: int = 3):
    """Batches of many agents' rows; agent k deviates from the policy by a spread of its own."""
    rng = np.random.default_rng(seed)
    spread = np.linspace(0.2, 0.4, agents)
    for _ in range(count):
        ids = rng.integers(0, agents, size)
        policy = rng.uniform(-0.3, 0.3, (size, n)).astype(np.float32)
        actions = policy + spread[ids, None] * rng.standard_normal((size, n))
        yield batch_of(actions, ids), torch.from_numpy(policy)


def deviation_of(batch, policy):
    return batch.action.double().numpy() - policy.double().numpy()


def weigher(*, agents: int = 10, **options) -> SimilarityWeigher:
    return SimilarityWeigher(DpsConfig(**options), own_id=OWN, agents=agents)


def lambda_oracle(mean, cov) -> float:
    return math.exp(-jeffreys_oracle(mean, cov, R))


def test_ten_agents_in_a_batch_of_64_are_measured_with_memory_and_not_without():
    plain, subject = weigher(scope="agent"), weigher(scope="agent", memory=20.0)
    seen = []
    for batch, policy in batches(40):
        alone, weighing = plain.weigh(batch, policy), subject.weigh(batch, policy)
        ids = batch.agent_id.numpy()
        seen.append((deviation_of(batch, policy), (ids == np.arange(10)[:, None]) & (ids != OWN)))
    assert bool(alone.degenerate)
    assert not bool(weighing.degenerate)
    for agent in range(1, 10):
        mean, cov, rows = history_oracle(seen, agent, 20.0)
        assert rows > 100
        expected = lambda_oracle(mean, cov)
        assert 1e-6 < expected < 1
        np.testing.assert_allclose(weighing.weight[ids == agent], expected, rtol=1e-5)
    assert set(weighing.weight[ids == OWN].tolist()) == {1.0}
    shown = subject.by_source(batch, policy)
    present = sorted(set(ids.tolist()) - {OWN})
    torch.testing.assert_close(
        shown.similarity[present].float(), torch.stack([weighing.weight[ids == k][0] for k in present])
    )
    assert not shown.degenerate.any()


def test_the_pool_has_running_moments_of_its_own():
    subject, seen = weigher(memory=5.0), []
    for batch, policy in batches(12):
        weighing = subject.weigh(batch, policy)
        external = (batch.agent_id != OWN).numpy()[None]
        seen.append((deviation_of(batch, policy), external))
    mean, cov, _ = history_oracle(seen, 0, 5.0)
    assert float(weighing.similarity) == pytest.approx(lambda_oracle(mean, cov), rel=1e-8)
    assert weighing.weight[torch.tensor(external[0])].unique().numel() == 1
    assert int(weighing.external) == external.sum()


@pytest.mark.parametrize("scope", ["pooled", "agent"])
@pytest.mark.parametrize("options", [{}, {"floor": True, "normalise": True, "debias": True}])
def test_the_first_batch_weighs_as_without_memory(scope, options):
    ((batch, policy),) = batches(1, agents=3)
    plain = weigher(agents=3, scope=scope, **options).weigh(batch, policy)
    found = weigher(agents=3, scope=scope, memory=50.0, **options).weigh(batch, policy)
    torch.testing.assert_close(found.weight, plain.weight, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.rho, plain.rho, rtol=1e-9, atol=0)


def test_debias_subtracts_what_the_effective_rows_would_show():
    corrected, plain, seen = weigher(memory=9.0, debias=True), weigher(memory=9.0), []
    for batch, policy in batches(20):
        gap = float(plain.weigh(batch, policy).rho - corrected.weigh(batch, policy).rho)
        external = (batch.agent_id != OWN).numpy()[None]
        seen.append((deviation_of(batch, policy), external))
    _, _, rows = history_oracle(seen, 0, 9.0)
    assert gap == pytest.approx(6 * 9 / (4 * rows), rel=1e-9)


def test_showing_the_sources_leaves_the_moments_alone():
    quiet, shown = weigher(scope="agent", memory=10.0), weigher(scope="agent", memory=10.0)
    for batch, policy in batches(15):
        expected = quiet.weigh(batch, policy).weight
        assert torch.equal(shown.weigh(batch, policy).weight, expected)
        for _ in range(2):
            shown.by_source(batch, policy)


def test_nothing_is_known_before_the_first_batch():
    ((batch, policy),) = batches(1, agents=3)
    for options in ({}, {"floor": True}):
        found = weigher(agents=3, memory=10.0, **options).by_source(batch, policy)
        assert found.degenerate.tolist() == [False, True, True]
        assert found.similarity.tolist() == [1.0, 0.0, 0.0]


def test_a_row_that_is_not_finite_makes_its_agent_degenerate_in_that_batch_only():
    subject = weigher(scope="agent", memory=10.0)
    for batch, policy in batches(20):
        subject.weigh(batch, policy)
    bad = int((batch.agent_id == 4).nonzero()[0, 0])
    policy = policy.clone()
    kept = float(policy[bad, 0])
    policy[bad, 0] = math.nan
    weighing = subject.weigh(batch, policy)
    assert weighing.degenerate
    assert set(weighing.weight[batch.agent_id == 4].tolist()) == {0.0}
    assert float(weighing.weight[batch.agent_id == 5].min()) > 0
    assert bool(subject.by_source(batch, policy).degenerate[4])
    policy[bad, 0] = kept
    assert float(subject.weigh(batch, policy).weight[bad]) > 0


def test_as_many_effective_rows_are_needed_as_rows_without_memory():
    subject, seen, verdicts = weigher(agents=2, memory=0.5), [], set()
    for batch, policy in batches(40, agents=2, size=12, n=6, seed=1):
        external = (batch.agent_id != OWN).numpy()[None]
        seen.append((deviation_of(batch, policy), external))
        few = history_oracle(seen, 0, 0.5)[2] <= 7
        assert bool(subject.weigh(batch, policy).degenerate) == few
        verdicts.add(few)
    assert verdicts == {True, False}


def test_memory_never_synchronises_with_the_host(unread):
    subjects = [weigher(scope=scope, memory=10.0, floor=True) for scope in ("pooled", "agent")]
    ((batch, policy),) = batches(1)
    for subject in subjects:
        subject.weigh(batch, policy)

    with unread():
        for subject in subjects:
            subject.weigh(batch, policy)
            subject.by_source(batch, policy)


@pytest.mark.parametrize("half_life", [-1.0, math.nan, math.inf])
def test_a_half_life_that_is_none_is_refused(half_life):
    with pytest.raises(ConfigError, match=r"dps\.memory"):
        resolve({"dps": {"memory": half_life}})


def test_memory_without_a_group_is_refused():
    with pytest.raises(ConfigError, match="memory = 5 has no use"):
        resolve({"dps": {"scope": "transition", "memory": 5.0}})
