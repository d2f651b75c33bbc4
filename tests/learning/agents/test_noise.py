"""The noise stream: its size, its state, and the clipped sum it goes into."""

import pytest
import torch

from dase_grpc.learning.agents.equations import NoiseStream, perturbed

CPU = torch.device("cpu")


def drawn_of(stream):
    return stream.fill(torch.empty(3, 5, dtype=torch.float64), 0.1)


def test_a_state_of_another_size_starts_a_stream_that_seed_and_updates_decide():
    foreign = torch.zeros(16, dtype=torch.uint8)
    drawn = []
    for seed, updates in ((1, 40), (1, 40), (1, 41), (2, 40)):
        stream = NoiseStream(seed, 0, CPU)
        assert stream.room_for(foreign).shape == (16,)
        stream.resume(foreign, updates=updates)
        drawn.append(drawn_of(stream))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[3])


@pytest.mark.parametrize("saved", [None, "text", torch.zeros(16)])
def test_there_is_only_room_for_a_generators_state(saved):
    stream = NoiseStream(1, 0, CPU)
    assert stream.room_for(saved).shape == stream.state().shape


def test_a_perturbed_action_passes_its_gradient_on_unless_a_bound_cuts_it():
    action = torch.tensor([[0.5, 0.95, -0.95, -0.2]], requires_grad=True)
    result = perturbed(action, torch.tensor([[9.0, 0.2, -0.2, -9.0]]), limit=0.25)
    torch.testing.assert_close(result.detach(), torch.tensor([[0.75, 1.0, -1.0, -0.45]]))
    result.sum().backward()
    assert action.grad.tolist() == [[1.0, 0.0, 0.0, 1.0]]
