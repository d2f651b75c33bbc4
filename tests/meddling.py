"""Environments that change settings of their process; as ids: `meddling:Meddles`."""

import gc
import locale
import logging
import os
import random
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from worlds import Array, Info, PointGoal, Step

from dase_grpc.process import settings as process_settings
from dase_grpc.process.containment import SURROUNDINGS, _changed_variables


def _leaves_the_folder() -> None:
    os.chdir("/")


def _sets_a_variable() -> None:
    os.environ["CHANGED_BY_AN_ENVIRONMENT"] = "yes"


def _draws_from_everybody() -> None:
    """From the generators that everybody in a process shares."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)


def _silences_the_log() -> None:
    logging.disable(logging.CRITICAL)
    logging.root.setLevel(logging.CRITICAL)
    logging.basicConfig(force=True, handlers=[logging.NullHandler()])
    for name in ("dase", "dase_grpc.learning.envs.make"):
        logging.getLogger(name).disabled = True


def _enters_the_inference_mode() -> None:
    mode = torch.inference_mode()
    mode.__enter__()
    _kept.append(mode)


_kept: list[Any] = []

FOUND_AGAIN: dict[str, Callable[[], object]] = {
    "leaves the folder": _leaves_the_folder,
    "sets the umask": lambda: os.umask(0o777),
    "has numpy raise": lambda: np.seterr(all="raise"),
    "prints arrays otherwise": lambda: np.set_printoptions(precision=1, legacy="1.13"),
    "sets a socket timeout": lambda: socket.setdefaulttimeout(1e-3),
    "computes in float64": lambda: torch.set_default_dtype(torch.float64),
    "computes elsewhere": lambda: torch.set_default_device("meta"),
    "needs no gradients": lambda: torch.set_grad_enabled(False),
    "only infers": _enters_the_inference_mode,
    "takes threads": lambda: torch.set_num_threads(2),
    "is deterministic": lambda: torch.set_deterministic_debug_mode("error"),
    "rounds products": lambda: torch.set_float32_matmul_precision("medium"),
    "seeks anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "tunes cuDNN": lambda: setattr(torch.backends.cudnn, "benchmark", True),
}
"""What an environment may rely on: it holds in its later calls."""

PUT_BACK: dict[str, Callable[[], object]] = {
    "collects no garbage": gc.disable,
    "limits recursion": lambda: sys.setrecursionlimit(200),
    "silences the log": _silences_the_log,
    "makes errors of warnings": lambda: warnings.simplefilter("error"),
    "takes the hook": lambda: setattr(sys, "excepthook", print),
    "takes the output": lambda: setattr(sys, "stdout", None),
    "blocks signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
    "switches rarely": lambda: sys.setswitchinterval(1.0),
}
"""What is put back for good."""

LEFT: dict[str, Callable[[], object]] = {
    "sets a variable": _sets_a_variable,
    "sets the locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
    "draws from everybody": _draws_from_everybody,
}
"""What stays as the environment makes it."""

DEEDS = {**FOUND_AGAIN, **PUT_BACK, **LEFT}


class Meddles(PointGoal):
    """Does what `deeds` name `when` it is made, reset, steps or is closed, each time; or "late", at step 7.

    Attributes:
        seen: what `look` gives in each call, after the deeds.
    """

    look: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(
        self, *, when: str = "never", deeds: tuple[str, ...] = (), render_mode: str | None = None
    ) -> None:
        super().__init__(render_mode=render_mode)
        self._when, self._deeds, self._steps = when, deeds, 0
        self.seen: dict[str, Any] = {}
        self._do("constructor")

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        self._do("reset")
        return super().reset(seed=seed)

    def step(self, action: Array) -> Step:
        self._steps += 1
        self._do("late" if self._steps == 7 else "step")
        return super().step(action)

    def close(self) -> None:
        self._do("close")

    def _do(self, call: str) -> None:
        if call == self._when:
            for deed in self._deeds:
                DEEDS[deed]()
        self.seen[call] = Meddles.look()


def module_that(*deeds: str) -> str:
    """The text of a module that does this on import, and has `Meddles`."""
    return (
        f"import meddling\nfor deed in {deeds!r}:\n    meddling.DEEDS[deed]()\nMeddles = meddling.Meddles\n"
    )


def settings() -> dict[str, Any]:
    """What the process is like."""
    return {name: setting.read() for name, setting in _known().items()}


def _known() -> dict[str, process_settings.Setting]:
    return {**process_settings.settings(), **process_settings.PUT_BACK}


@contextmanager
def put_back() -> Iterator[None]:
    """Afterwards the process is as before, whatever environments made of it, and they have left no trace.

    Within, no warning is an error yet, as in a program.
    """
    logging.getLogger("dase")
    filters = list(warnings.filters)
    warnings.filters[:] = [each for each in filters if each[0] != "error"]  # type: ignore[index]
    before, variables, language = settings(), os.environ.copy(), locale.setlocale(locale.LC_ALL)
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, language)
        SURROUNDINGS.__init__()  # type: ignore[misc]
        _changed_variables.clear()
        while _kept:
            _kept.pop().__exit__(None, None, None)
        sys.modules.pop("meddles_on_import", None)
        for name, setting in _known().items():
            if setting.read() != before[name]:
                setting.write(before[name])
        sys.setrecursionlimit(before["recursion limit"])
        warnings.filters[:] = filters  # type: ignore[index]
        for name in {*os.environ} - {*variables}:
            del os.environ[name]
