"""The running normaliser against NumPy over everything it has seen."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dase_grpc.learning.agents.policy import CLIP, MIN_DEVIATION, Normaliser

CPU = torch.device("cpu")
M = 4


def batches(count: int, rows: int = 32, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    spread, centre = np.array([1.0, 20.0, 0.3, 5.0]), np.array([0.0, 1e4, -7.0, 1.0])
    return [(centre + spread * rng.normal(size=(rows, M)) * (1 + k)).astype(np.float32) for k in range(count)]


def learned(data: list[np.ndarray], weight: torch.Tensor | None = None) -> Normaliser:
    normaliser = Normaliser.new(M, CPU)
    for batch in data:
        normaliser.learn(torch.from_numpy(batch), torch.ones(len(batch)) if weight is None else weight)
    return normaliser


def values(normaliser: Normaliser) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in normaliser.named_tensors()}


@pytest.mark.parametrize("count", [1, 2, 30])
def test_mean_and_variance_are_those_of_all_rows_seen(count):
    data = batches(count)
    rows = np.concatenate(data).astype(float)
    found = values(learned(data))
    np.testing.assert_allclose(found["normaliser.mean"], rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found["normaliser.variance"], rows.var(axis=0), rtol=1e-9)
    assert found["normaliser.count"] == count


def test_a_mean_far_from_zero_costs_no_digits():
    data = [batch + np.float32(1e6) for batch in batches(20)]
    rows = np.concatenate(data).astype(float)
    found = values(learned(data))
    np.testing.assert_allclose(found["normaliser.variance"], rows.var(axis=0), rtol=1e-8)


def test_rows_count_by_their_weights():
    data = batches(6)
    weight = np.random.default_rng(1).uniform(size=32)
    rows, w = np.concatenate(data).astype(float), np.tile(weight, 6)
    mean = np.average(rows, axis=0, weights=w)
    found = values(learned(data, torch.from_numpy(weight)))
    np.testing.assert_allclose(found["normaliser.mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(
        found["normaliser.variance"], np.average((rows - mean) ** 2, axis=0, weights=w), rtol=1e-9
    )


@settings(max_examples=30)
@given(order=st.permutations(range(6)))
def test_the_order_of_the_batches_does_not_matter(order):
    data = batches(6)
    first, second = values(learned(data)), values(learned([data[k] for k in order]))
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=1e-10)


def test_what_was_seen_becomes_of_mean_zero_and_deviation_one_and_is_clipped():
    data = batches(10)
    normaliser = learned(data)
    rows = torch.from_numpy(np.concatenate(data))
    z = normaliser.normalise(rows)
    assert z.dtype == torch.float32
    assert z.abs().max() <= CLIP
    assert z.mean(dim=0).abs().max() < 0.05
    torch.testing.assert_close(z.std(dim=0), torch.ones(M), atol=0.05, rtol=0)
    assert torch.equal(normaliser.normalise(rows + 1e9), torch.full_like(rows, CLIP))


def test_a_dimension_that_hardly_varies_is_not_blown_up():
    rows = torch.zeros(64, M)
    rows[:, 1] = 3 + 1e-4 * torch.randn(64, generator=torch.Generator())
    normaliser = Normaliser.new(M, CPU)
    normaliser.learn(rows, torch.ones(64))
    z = normaliser.normalise(rows)
    assert z.abs().max() < 1e-3 / MIN_DEVIATION
    assert torch.equal(z[:, 0], torch.zeros(64))


def test_before_it_has_learned_it_only_clips():
    rows = torch.randn(8, M, generator=torch.Generator()) * 4
    assert torch.equal(Normaliser.new(M, CPU).normalise(rows), rows.clamp(-CLIP, CLIP))
