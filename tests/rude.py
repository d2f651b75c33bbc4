"""Environments that do what is none of their business; as ids: `rude:Misbehaves`."""

import os
import threading
from typing import Any

from worlds import Array, PointGoal


class Misbehaves(PointGoal):
    """Behaves until step `at` of its life, then does `what` once."""

    def __init__(self, *, what: str, at: int = 60) -> None:
        super().__init__()
        self._what, self._at, self._count = what, at, 0

    def step(self, action: Array) -> Any:
        self._count += 1
        if self._count == self._at:
            getattr(self, self._what)()
        return super().step(action)

    def ends_the_process(self) -> None:
        os._exit(0)

    def stops_iterating(self) -> None:
        raise StopIteration

    def exits(self) -> None:
        raise SystemExit(0)

    def leaves_the_folder(self) -> None:
        os.chdir("/")

    def leaves_a_thread(self) -> None:
        threading.Thread(target=threading.Event().wait, args=(300,)).start()
