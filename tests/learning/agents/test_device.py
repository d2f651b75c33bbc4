import pytest
import torch
from contracts.sentences import refuses

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.config.gpus import Gpus
from dase_grpc.errors import DeviceError
from dase_grpc.learning.agents.device import gpu_indices, pick_device, use


def test_without_an_index_the_cpu_is_used_whatever_the_machine_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(None) == torch.device("cpu")


@pytest.mark.parametrize("index", [0, 1])
def test_an_index_picks_that_gpu(monkeypatch, index):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(index) == torch.device("cuda", index)


@pytest.mark.parametrize("index", [-1, 2, 9])
def test_an_index_that_is_not_there_is_refused_and_says_how_many_there_are(monkeypatch, index):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=f"--gpu {index}: torch finds 2 CUDA devices on this machine, "):
        pick_device(index)


def test_a_machine_without_a_gpu_is_no_silent_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="torch finds no CUDA device on this machine; leave --gpu out"):
        pick_device(0)


def test_all_gpus_are_those_that_there_are_and_named_ones_are_left_to_pick(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert gpu_indices(Gpus.parse("all")) == (0, 1, 2)
    assert gpu_indices(Gpus.parse("5,0")) == (5, 0)


@pytest.mark.parametrize("asked", ["all", "0,1"])
def test_gpus_of_a_machine_without_one_are_refused_as_they_were_asked_for(monkeypatch, asked):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with refuses(DeviceError, f"--gpu {asked}: torch finds no CUDA device on this machine; leave --gpu out"):
        gpu_indices(Gpus.parse(asked))


def test_a_gpu_is_made_the_current_one_and_a_cpu_changes_nothing(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    use(torch.device("cpu"))
    use(torch.device("cuda", 1))
    assert chosen == [torch.device("cuda", 1)]


EXACT, ROUNDING = AgentConfig(), AgentConfig(products="bfloat16")


@pytest.mark.parametrize("capability", ["avx512_bf16", "amx_bf16", "bf16"])
def test_a_cpu_that_multiplies_bfloat16_may_be_asked_to(monkeypatch, capability):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, capability: True})
    assert pick_device(None, [EXACT, ROUNDING]) == torch.device("cpu")


@pytest.mark.parametrize("capabilities", [{}, {"avx512_f": True, "avx512_bf16": False}], ids=str)
def test_a_cpu_that_does_not_multiply_bfloat16_is_refused_for_agents_that_ask_for_it_alone(
    monkeypatch, capabilities
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert pick_device(None, [EXACT]) == torch.device("cpu")
    with pytest.raises(
        DeviceError, match=r"agent\.products = bfloat16: torch finds no .*; leave agent\.products out$"
    ):
        pick_device(None, [EXACT, ROUNDING])


def test_products_of_bfloat16_are_for_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match=r"--gpu 0: agent\.products = bfloat16 is for updates on a CPU"):
        pick_device(0, [ROUNDING])
