"""Weights never become NaN: whatever a batch holds, an update leaves the agent finite."""

import numpy as np
import pytest
import torch
from learning.agent_cases import make, tiny
from learning.dpd_cases import Board, dpd_of
from learning.td3_cases import SCHEMA

from dase_grpc.config.algorithms import ALGORITHMS
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.memory import Flat
from dase_grpc.learning.agents.optimiser import GuardedSteps, Steps

HUGE = float(np.finfo(np.float32).max)


def agent(algorithm):
    own = {"policy_delay": 1} if algorithm == "td3" else {}
    return make(tiny(algorithm, **own), seed=0)


def twin(algorithm):
    """An agent that learns as a stack does."""
    own = {"policy_delay": 1} if algorithm == "td3" else {}
    return make(tiny(algorithm, **own), seed=0, autograd=True)


def pair(algorithm):
    """An agent that distils a peer's policy at each update."""
    own, peer, board = agent(algorithm), agent(algorithm), Board()
    board.show(peer)
    return dpd_of(own, board)


def batch(**columns):
    rows = torch.randn(16, SCHEMA.width, generator=torch.Generator().manual_seed(1))
    for name, value in columns.items():
        rows[3, SCHEMA.columns[name]] = value
    return Batch.from_rows(SCHEMA, rows)


def not_finite(learner):
    return [name for name, value in learner.state_dict().items() if not bool(value.isfinite().all())]


ONES = torch.ones(16)


@pytest.mark.parametrize("kind", [agent, twin, pair])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "columns",
    [
        {"reward": HUGE},
        {"reward": -1e20},
        {"reward": float("nan")},
        {"observation": HUGE},
        {"observation": 1e13},  # of which the loss is small enough, and the gradient's square is not
        {"next_observation": -HUGE},
    ],
    ids=str,
)
def test_no_row_however_huge_brings_a_number_that_is_not_finite_into_an_agent(kind, algorithm, columns):
    learner = kind(algorithm)
    learner.update(batch(), ONES)
    for _ in range(5):
        learner.update(batch(**columns), ONES)
    assert not_finite(learner) == []
    before = learner.state_dict()
    learner.update(batch(), ONES)
    assert not_finite(learner) == []
    assert any(not torch.equal(value, before[name]) for name, value in learner.state_dict().items())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_left_out_changes_no_weight_and_no_moment_and_is_counted(algorithm):
    learner = agent(algorithm)
    learner.update(batch(), ONES)
    assert learner.take_steps() == {"critic": Steps(1, 0), "actor": Steps(1, 0)}
    before = learner.state_dict()
    learner.update(batch(reward=HUGE), ONES)
    learner.update(batch(reward=HUGE), ONES)
    assert learner.take_steps()["critic"] == Steps(2, 2)
    assert learner.take_steps()["critic"] == Steps(0, 0)
    after = learner.state_dict()
    kept = [name for name in before if name.startswith(("critic.", "critic_optimizer."))]
    assert kept
    assert all(torch.equal(before[name], after[name]) for name in kept)


def optimised(value=1.0, count=2):
    network = torch.nn.ParameterList([torch.full((count,), value)])
    return network[0], GuardedSteps(Flat(network), lr=0.1)


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 1e31, -1e35])
def test_a_step_whose_loss_adams_second_moment_cannot_hold_the_square_of_is_left_out(factor):
    weight, guarded = optimised()
    guarded.count()
    guarded.minimise((weight * torch.tensor([1.0, factor])).sum())
    assert weight.tolist() == [1.0, 1.0]
    assert guarded.take() == Steps(1, 1)
    guarded.count()
    guarded.minimise(weight.sum())
    assert weight.tolist() == pytest.approx([0.9, 0.9])
    assert guarded.take() == Steps(1, 0)


def test_a_finite_step_is_that_of_torchs_adam_to_the_last_bit():
    weight, guarded = optimised(0.3, count=32)
    other = torch.nn.Parameter(torch.full((32,), 0.3))
    plain = torch.optim.Adam([other], lr=0.1, fused=True)
    for number in range(20):
        factor = torch.tensor([np.sin(number), 1e-20 * number] * 16, dtype=torch.float32)
        guarded.count()
        guarded.minimise((weight.square() * factor).sum())
        plain.zero_grad()
        (other.square() * factor).sum().backward()
        plain.step()
    assert torch.equal(weight, other)
    state = dict(guarded.named_tensors("of"))
    assert state.keys() == {f"of.0.{key}" for key in plain.state[other]}
    for key, value in plain.state[other].items():
        without_subnormals = value.where(value.abs() >= torch.finfo(value.dtype).tiny, 0)
        assert torch.equal(state[f"of.0.{key}"], without_subnormals)


@pytest.mark.parametrize(("size", "left_out"), [(1.5e19, 0), (-2e19, 1), (HUGE, 1)])
def test_a_step_is_taken_whose_squares_are_finite_though_their_sum_is_not(size, left_out):
    weight, guarded = optimised()
    guarded.count()
    weight.grad.fill_(size)
    with torch.no_grad():
        guarded.step(torch.zeros(()))
    assert guarded.take() == Steps(1, left_out)
    state = dict(guarded.named_tensors("of"))
    assert state["of.0.step"] == 1 - left_out
    assert state["of.0.exp_avg_sq"].isfinite().all()


def test_a_step_that_the_caller_skips_is_not_counted_as_left_out():
    weight, guarded = optimised()
    guarded.count()
    guarded.minimise(weight.sum(), skip=torch.ones(()))
    assert weight.tolist() == [1.0, 1.0]
    assert guarded.take() == Steps(1, 0)
