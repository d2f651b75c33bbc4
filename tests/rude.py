"""Environments that do what is none of their business; as ids: `rude:Misbehaves`."""

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

from worlds import Array, PointGoal


class Misbehaves(PointGoal):
    """Behaves until step `at` of its life, then does `what` once.

    With `ever` each later step of the process does it too.
    """

    broken = False

    def __init__(self, *, what: str, at: int = 60, ever: bool = False) -> None:
        super().__init__()
        self._what, self._at, self._ever, self._count = what, at, ever, 0

    def step(self, action: Array) -> Any:
        self._count += 1
        if self._count == self._at or (self._ever and Misbehaves.broken):
            Misbehaves.broken = True
            getattr(self, self._what)()
        return super().step(action)

    def ends_the_process(self) -> None:
        os._exit(0)

    def stops_iterating(self) -> None:
        raise StopIteration

    def nothing(self) -> None:
        """Is no misbehaviour at all."""

    def breaks(self) -> None:
        raise RuntimeError("the simulator broke")

    def exits(self) -> None:
        raise SystemExit(0)

    def sleeps_for_ever(self) -> None:
        threading.Event().wait()

    def forks_and_is_killed_once(self) -> None:
        """Leaves a process that holds all that this one held; only the first of all processes does it."""
        with suppress(FileExistsError), open("killed", "x"):
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    def leaves_the_folder(self) -> None:
        os.chdir("/")

    def leaves_a_thread(self) -> None:
        threading.Thread(target=threading.Event().wait, args=(600,)).start()
