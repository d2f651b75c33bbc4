"""Adam's moments end at 0 where gradients have ended, not at numbers that processors are slow with."""

import pytest
import torch

from dase_grpc.learning.agents.memory import Flat
from dase_grpc.learning.agents.optimiser import GuardedSteps, subnormals_as_zero

WIDTH = 8
STILL = slice(3, None)
"""What has gradients at first only, as the weights of a unit whose ReLU lets nothing through any more."""
STEPS, GONE_AT = 1500, 50
SUBNORMAL = torch.finfo(torch.float32).tiny / 2


def gradients():
    source = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        gradient = torch.randn(WIDTH, generator=source)
        if step >= GONE_AT:
            gradient[STILL] = 0
        yield gradient


def takes_subnormals_for_zero():
    return not bool(torch.tensor([SUBNORMAL]) * 1)


def own_and_torch_steps():
    """A flat parameter moved by our steps, and one by torch's Adam, along the same gradients."""
    start = torch.linspace(-1, 1, WIDTH)
    own = torch.nn.ParameterDict({"weight": torch.nn.Parameter(start.clone())})
    flat = Flat(own)
    guarded = GuardedSteps(flat, lr=1e-3)
    theirs = torch.nn.Parameter(start.clone())
    adam = torch.optim.Adam([theirs], lr=1e-3, fused=True)
    for gradient in gradients():
        own["weight"].grad.copy_(gradient)
        guarded.step(torch.ones(()))
        theirs.grad = gradient
        adam.step()
    return own["weight"].detach(), dict(guarded.named_tensors("adam")), theirs.detach(), adam.state[theirs]


def test_moments_without_gradients_end_at_0_and_values_are_those_of_torch():
    own, state, theirs, kept = own_and_torch_steps()

    mean, square = state["adam.weight.exp_avg"], state["adam.weight.exp_avg_sq"]
    assert bool((mean[STILL] == 0).all())
    assert bool((kept["exp_avg"][STILL] != 0).all()), "torch's would have ended there, too"
    assert torch.equal(own, theirs)
    assert torch.equal(square, kept["exp_avg_sq"])
    assert torch.equal(mean[: STILL.start], kept["exp_avg"][: STILL.start])


def test_a_step_leaves_the_thread_as_it_was():
    own_and_torch_steps()

    assert not takes_subnormals_for_zero()


def fails():
    with subnormals_as_zero():
        assert takes_subnormals_for_zero()
        raise ZeroDivisionError


@pytest.mark.parametrize("already", [False, True])
def test_what_the_thread_did_before_comes_back_even_after_an_error(already):
    torch.set_flush_denormal(already)
    try:
        with pytest.raises(ZeroDivisionError):
            fails()
        assert takes_subnormals_for_zero() == already
    finally:
        torch.set_flush_denormal(False)
