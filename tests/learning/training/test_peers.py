"""Policies between agents: as bytes, and within one process."""

import pytest
import safetensors.torch
import torch
from contracts.sentences import assert_one_sentence
from learning.agent_cases import CONFIGS, make
from learning.td3_cases import CPU, SCHEMA, assert_same

from dase_grpc.errors import DaseError
from dase_grpc.learning.agents.policy import policy_tensors
from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.learning.training.parts import from_bytes, to_bytes
from dase_grpc.progress import is_newer

STRANGE = {
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "double": torch.linspace(0, 1, 7, dtype=torch.float64),
    "count": torch.tensor([2**40], dtype=torch.int64),
    "flags": torch.tensor([True, False]),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "expanded": torch.tensor([1.0]).expand(5),
    "grad": torch.nn.Parameter(torch.ones(2)),
}


def test_tensors_survive_as_bytes_whatever_they_are():
    assert_same(from_bytes(to_bytes(STRANGE)), {name: each.detach() for name, each in STRANGE.items()})


def test_tensors_that_share_memory_are_packed_apart():
    whole = torch.arange(10.0)
    packed = to_bytes({"whole": whole, "again": whole, "part": whole[2:4]})
    assert_same(from_bytes(packed), {"whole": whole, "again": whole, "part": whole[2:4]})


def test_a_part_of_a_large_tensor_takes_no_more_room_than_itself():
    assert len(to_bytes({"part": torch.zeros(1_000_000)[:10]})) < 1_000


def test_bytes_do_not_change_with_the_tensors_they_were_packed_from():
    tensor = torch.ones(3)
    packed = to_bytes({"t": tensor})
    tensor.zero_()
    assert torch.equal(from_bytes(packed)["t"], torch.ones(3))


def test_bytes_are_plain_safetensors():
    assert_same(safetensors.torch.load(to_bytes({"t": torch.ones(3)})), {"t": torch.ones(3)})


@pytest.mark.parametrize(
    "payload",
    [b"", b"no tensors", to_bytes({"t": torch.ones(3)})[:-1], b"\x80\x04K\x01.", bytes(8) + b"{}"],
    ids=["nothing", "text", "cut", "a pickle", "no header"],
)
def test_bytes_that_are_no_tensors_are_refused_in_one_sentence(payload):
    with pytest.raises(DaseError) as refusal:
        from_bytes(payload)
    assert_one_sentence(refusal.value, f"{len(payload)} bytes are not tensors")


@pytest.mark.parametrize("name", CONFIGS)
def test_an_agents_policy_acts_the_same_after_the_journey(name):
    agent, observation = make(CONFIGS[name]), torch.randn(5, SCHEMA.observation_size).numpy()
    travelled = from_bytes(to_bytes(policy_tensors(agent.state_dict())))
    policy = load_policy(CONFIGS[name], SCHEMA, travelled, CPU)
    assert (policy.act(observation) == agent.act(observation)).all()


def test_versions_grow_and_the_same_again_is_not_news():
    assert [is_newer(0, None), is_newer(5, None), is_newer(6, 5), is_newer(5, 5)] == [True, True, True, False]
    with pytest.raises(ValueError, match="policy 4 cannot be published after policy 5"):
        is_newer(4, 5)
