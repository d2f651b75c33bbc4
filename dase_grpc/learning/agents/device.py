"""The device that an agent computes on: found or refused, never a silent fallback; copies queued on it."""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.config.gpus import Gpus
from dase_grpc.errors import DeviceError
from dase_grpc.progress import several

BFLOAT16_CAPABILITIES: Final = ("avx512_bf16", "amx_bf16", "bf16")
"""What torch calls the instructions that multiply bfloat16: of x86 vectors, x86 tiles and ARM."""


def pick_device(gpu: int | None, agents: Iterable[AgentConfig] = ()) -> torch.device:
    """The CPU, or the CUDA device with this index; `agents` are those that it is for.

    Raises:
        DeviceError: there is no such CUDA device, or one of the agents is to multiply in bfloat16, and the
            device is none that this is for.
    """
    rounds = any(agent.products == "bfloat16" for agent in agents)
    if gpu is None:
        if rounds and not _multiplies_bfloat16():
            raise DeviceError(
                "agent.products = bfloat16: torch finds no instructions for such products in this CPU "
                "(AVX512_BF16, AMX or ARM's BF16); leave agent.products out"
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not 0 <= gpu < count:
        raise _not_there(gpu, count)
    if rounds:
        raise DeviceError(
            f"--gpu {gpu}: agent.products = bfloat16 is for updates on a CPU; leave one of the two out"
        )
    return torch.device("cuda", gpu)


def gpu_indices(gpus: Gpus) -> tuple[int, ...]:
    """Those that are named, or all that torch finds. DeviceError where it finds none."""
    if not (count := torch.cuda.device_count()):
        raise _not_there(gpus, count)
    return tuple(range(count)) if gpus.indices is None else gpus.indices


def _not_there(asked: int | Gpus, count: int) -> DeviceError:
    found = several(count, "CUDA device") if count else "no CUDA device"
    numbered = ", numbered from 0" if count else ""
    return DeviceError(
        f"--gpu {asked}: torch finds {found} on this machine{numbered}; leave --gpu out to use the CPU"
    )


def _multiplies_bfloat16() -> bool:
    # the oldest torch that this project takes has nothing to ask
    found: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(found.get(name) for name in BFLOAT16_CAPABILITIES)


def gpu_names() -> list[str]:
    """The GPUs that torch sees, by index."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def use(device: torch.device) -> None:
    """Makes a CUDA device the calling thread's current one, which each thread has of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def reserved_bytes(device: torch.device) -> int:
    """What PyTorch of this process has reserved of a GPU; 0 of a CPU. Any thread; does not wait for it."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


class Mark:
    """A point in a lane, behind all that had been queued in it by then; this one is always passed."""

    def wait(self) -> None:
        """Blocks the calling thread until the lane has come there."""


class Lane:
    """Work in order; on a CPU, which has nothing to queue, it is done at once. One thread's."""

    def copy(self, place: Tensor, source: Tensor) -> None:
        """Queues a copy; host memory in it is pinned, and stays as it is until a mark after it is passed."""
        place.copy_(source)

    def mark(self) -> Mark:
        """A mark behind all that is queued."""
        return Mark()

    def follow(self, mark: Mark) -> None:
        """Whatever is queued here from now on waits for a mark of another lane; nobody else does."""
        mark.wait()


class CudaMark(Mark):
    """A mark in a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own annotation
        self.event.record(stream)

    def wait(self) -> None:
        """See Mark."""
        self.event.synchronize()


class CudaLane(Lane):
    """A CUDA stream: one of its own, or the one that the calling thread computes in."""

    def __init__(self, device: torch.device, *, own: bool) -> None:
        self._device = device
        made = torch.cuda.Stream(device) if own else None  # type: ignore[no-untyped-call]  # as above
        self._own: torch.cuda.Stream | None = made

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._own is None else self._own

    def copy(self, place: Tensor, source: Tensor) -> None:
        """See Lane."""
        with torch.cuda.stream(self._stream):
            place.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """See Lane."""
        return CudaMark(self._stream)

    def follow(self, mark: Mark) -> None:
        """See Lane."""
        if isinstance(mark, CudaMark):
            self._stream.wait_event(mark.event)
        else:
            mark.wait()


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor in memory that this GPU can copy to and from by itself; for a CPU as it is."""
    if device.type != "cuda":
        return tensor
    with torch.cuda.device(device):  # pinning needs a context on a GPU: on this one, else on the first
        return tensor.pin_memory()
