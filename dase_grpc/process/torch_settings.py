"""Settings of torch that an environment may change, and work that does not depend on them."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import torch

from dase_grpc.process.settings import BASIC, Setting

P = ParamSpec("P")
R = TypeVar("R")

_modes: Final[list[tuple[torch.inference_mode, bool]]] = []
"""The inference modes that were set here, each with what was before; one ends with its object."""


def _device() -> torch.device | None:
    # one that was set is a mode of torch's functions; asking for it makes a tensor, which takes 12 µs
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def _set_inference_mode(on: bool) -> None:
    if _modes and _modes[-1][1] == on:
        _modes.pop()[0].__exit__(None, None, None)
    else:
        _modes.append((torch.inference_mode(on), not on))
        _modes[-1][0].__enter__()


def _cudnn() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return cudnn.enabled, cudnn.benchmark, cudnn.deterministic


def _set_cudnn(setting: tuple[bool, bool, bool]) -> None:
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = setting


def with_gradients(work: Callable[P, R]) -> Callable[P, R]:
    """The work, done with gradients as torch has them from the start, whatever somebody has made of that."""

    @wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return work(*args, **kwargs)
        with torch.inference_mode(False), torch.enable_grad():
            return work(*args, **kwargs)

    return done


ALL: Final[Mapping[str, Setting]] = {
    **BASIC,
    "default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    "default device": Setting(_device, torch.set_default_device, None),
    "inference mode": Setting(torch.is_inference_mode_enabled, _set_inference_mode, False),
    "gradients": Setting(torch.is_grad_enabled, torch.set_grad_enabled, True),
    "threads": Setting(torch.get_num_threads, torch.set_num_threads),
    # torch.use_deterministic_algorithms imports the compiler, which takes seconds
    "determinism": Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    "products": Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    "cuDNN": Setting(_cudnn, _set_cudnn),
    "anomalies": Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled, False),
}
"""In an order in which they can be set: a change of the inference mode changes what is said of gradients."""
