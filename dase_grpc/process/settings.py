"""Settings of the process that environments change: how each is read and set."""

import gc
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

import numpy as np

UNKNOWN: Final = object()

OUR_LOGGERS: Final = ("dase", "dase_grpc")


@dataclass(frozen=True)
class Setting:
    """One setting; what `read` gave, `write` sets.

    Attributes:
        initial: what it is once its library has just been imported, if that can be said.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    initial: Any = UNKNOWN


def _folder() -> str | None:
    try:
        return os.getcwd()  # a text, four times as fast as a Path
    except OSError:
        return None


def _change_folder(folder: str | None) -> None:
    if folder is not None:
        with suppress(OSError):  # it was removed meanwhile; no path of ours depends on it
            os.chdir(folder)


def _umask() -> int:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
    except (OSError, StopIteration):  # elsewhere only setting it tells it, also to other threads meanwhile
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


FOLDER: Final = "folder"

BASIC: Final[Mapping[str, Setting]] = {
    FOLDER: Setting(_folder, _change_folder),
    "umask": Setting(_umask, os.umask),
    "float errors": Setting(np.geterr, lambda kinds: np.seterr(**kinds)),
    "print options": Setting(np.get_printoptions, lambda options: np.set_printoptions(**options)),
    "socket timeout": Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
}
"""What an environment may rely on in later calls, and finds again there (containment.py)."""


def settings() -> Mapping[str, Setting]:
    """All that an environment finds again; those of torch once somebody has imported it."""
    return _with_torch() if "torch" in sys.modules else BASIC


@cache
def _with_torch() -> Mapping[str, Setting]:
    """In an order in which they can be set: the inference mode changes what is said of gradients."""
    import torch  # takes seconds

    cudnn, modes = torch.backends.cudnn, list[tuple[torch.inference_mode, bool]]()

    def device() -> torch.device | None:
        # one that was set is a mode of torch's functions; asking for it makes a tensor, which takes 12 µs
        return torch.get_default_device() if torch._C._len_torch_function_stack() else None

    def set_inference_mode(on: bool) -> None:
        if modes and modes[-1][1] == on:  # that mode ends with its object
            modes.pop()[0].__exit__(None, None, None)
        else:
            modes.append((torch.inference_mode(on), not on))
            modes[-1][0].__enter__()

    return {
        **BASIC,
        "default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        "default device": Setting(device, torch.set_default_device, None),
        "inference mode": Setting(torch.is_inference_mode_enabled, set_inference_mode, False),
        "gradients": Setting(torch.is_grad_enabled, torch.set_grad_enabled, True),
        "threads": Setting(torch.get_num_threads, torch.set_num_threads),
        # torch.use_deterministic_algorithms imports the compiler, which takes seconds
        "determinism": Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
        "products": Setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"
        ),
        "cuDNN": _attributes(*((cudnn, name) for name in ("enabled", "benchmark", "deterministic"))),
        "anomalies": Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled, False),
    }


def _attributes(*places: tuple[object, str]) -> Setting:
    """Attributes of modules, all together."""

    def write(values: tuple[Any, ...]) -> None:
        for (owner, name), value in zip(places, values, strict=True):
            setattr(owner, name, value)

    return Setting(lambda: tuple(getattr(owner, name) for owner, name in places), write)


def _set_collection(setting: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if setting[0] else gc.disable)()
    gc.set_threshold(*setting[1])


def _logging() -> tuple[int, tuple[Any, ...]]:
    """What decides whether and where lines of this project are written."""
    known = [
        (name, each)
        for name, each in list(logging.root.manager.loggerDict.items())  # other threads make loggers
        if name.split(".")[0] in OUR_LOGGERS
    ]
    ours = [each for name, each in sorted(known) if isinstance(each, logging.Logger)]
    loggers = tuple(
        (each, each.level, each.disabled, each.propagate, *((h, h.level) for h in each.handlers))
        for each in (logging.root, *ours)
    )
    return logging.root.manager.disable, loggers


def _set_logging(setting: tuple[int, tuple[Any, ...]]) -> None:
    disabled_up_to, loggers = setting
    logging.disable(disabled_up_to)
    for logger, level, disabled, propagate, *handlers in loggers:
        logger.setLevel(level)
        logger.disabled, logger.propagate = disabled, propagate
        for handler, its_level in handlers:
            handler.setLevel(its_level)
        if not {handler for handler, _ in handlers} <= {*logger.handlers}:  # one that is added is no harm
            logger.handlers[:] = [handler for handler, _ in handlers]


def _set_filters(before: tuple[Any, ...]) -> None:
    """As they were, and before them what is new, but for what makes errors of everybody's warnings."""
    now = cast("list[Any]", warnings.filters)
    new = [each for each in now if each not in before and not _is_error_for_all(*each)]
    if now != (wanted := [*new, *before]):
        warnings.resetwarnings()  # also has those forgotten that were shown once
        now.extend(wanted)


def _is_error_for_all(action: str, message: object, category: type, module: object, line: int) -> bool:
    return (
        action == "error" and (message, module, line) == (None, None, 0) and category.__module__ == "builtins"
    )


def _raise_recursion_limit(limit: int) -> None:
    sys.setrecursionlimit(max(limit, sys.getrecursionlimit()))


PUT_BACK: Final[Mapping[str, Setting]] = {
    "hooks": _attributes((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")),
    "streams": _attributes(*((sys, name) for name in ("stdin", "stdout", "stderr"))),
    "garbage collection": Setting(lambda: (gc.isenabled(), gc.get_threshold()), _set_collection),
    "recursion limit": Setting(sys.getrecursionlimit, _raise_recursion_limit),
    "switch interval": Setting(sys.getswitchinterval, sys.setswitchinterval),
    "blocked signals": Setting(
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda blocked: signal.pthread_sigmask(signal.SIG_SETMASK, blocked),
    ),
    "logging": Setting(_logging, _set_logging),
    "warnings": Setting(lambda: tuple(warnings.filters), _set_filters),
}
"""What is put back for good, for no environment needs what it makes of it for its own steps."""
