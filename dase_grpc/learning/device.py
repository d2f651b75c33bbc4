"""Which device an agent computes on; never a silent fallback."""

import torch

from dase_grpc.errors import DeviceError


def pick_device(gpu: int | None) -> torch.device:
    """The CPU, or the CUDA device with this index.

    Raises:
        DeviceError: there is no such CUDA device.
    """
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
