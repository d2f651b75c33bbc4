"""The device that an agent computes on, found or refused; never a silent fallback."""

from collections.abc import Iterable, Mapping
from typing import Final

import torch

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.errors import DeviceError

BFLOAT16_CAPABILITIES: Final = ("avx512_bf16", "amx_bf16", "bf16")
"""What torch calls the instructions that multiply bfloat16: of x86 vectors, x86 tiles and ARM."""


def pick_device(gpu: int | None, agents: Iterable[AgentConfig] = ()) -> torch.device:
    """The CPU, or the CUDA device with this index; `agents` are those that it is for.

    Raises:
        DeviceError: there is no such CUDA device, or one of the agents is to multiply in bfloat16, and the
            device is none that this is for.
    """
    device = _device(gpu)
    if any(agent.products == "bfloat16" for agent in agents):
        _require_bfloat16(gpu)
    return device


def _require_bfloat16(gpu: int | None) -> None:
    if gpu is not None:
        raise DeviceError(
            f"--gpu {gpu}: agent.products = bfloat16 is for updates on a CPU; leave one of the two out"
        )
    # the oldest torch that this project takes has nothing to ask
    found: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    if not any(found.get(name) for name in BFLOAT16_CAPABILITIES):
        raise DeviceError(
            "agent.products = bfloat16: torch finds no instructions for such products in this CPU "
            "(AVX512_BF16, AMX or ARM's BF16); leave agent.products out"
        )


def _device(gpu: int | None) -> torch.device:
    if gpu is None:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not 0 <= gpu < count:
        found = "no CUDA device" if count == 0 else f"CUDA devices 0..{count - 1}"
        raise DeviceError(f"--gpu {gpu}: torch finds {found} on this machine; leave --gpu out to use the CPU")
    return torch.device("cuda", gpu)


def use(device: torch.device) -> None:
    """Makes a CUDA device the calling thread's current one, which each thread has of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def reserved_bytes(device: torch.device) -> int:
    """What PyTorch of this process has reserved of a GPU; 0 of a CPU. Any thread; does not wait for it."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
