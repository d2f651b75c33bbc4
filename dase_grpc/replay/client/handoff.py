"""Handoff: a bounded, closable queue between two threads, compute and event loop."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from dase_grpc.errors import Halted

T = TypeVar("T")

LOOK_S: Final = 0.25
"""How often a wait looks whether it shall be given up."""


class Handoff(Generic[T]):
    """Carries items between two threads; closing it wakes both sides.

    `on_change` is called after `put`, `get` and `close`, on the thread that called these; it must not block.

    Attributes:
        added: how many items `put` has added.
    """

    def __init__(self, limit: int, *, on_change: Callable[[], object] | None = None) -> None:
        self._limit = limit
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._on_change = on_change
        self.added = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        """Whether `put` would block."""
        return len(self._items) >= self._limit

    def put(self, item: T) -> None:
        """Adds an item; blocks while `limit` items are waiting.

        Raises:
            Halted: the queue is closed.
        """
        with self._changed:
            while len(self._items) >= self._limit and not self._closed:
                self._changed.wait()
            if self._closed:
                raise Halted
            self._items.append(item)
            self.added += 1
            self._changed.notify_all()
        self._tell()

    def get(self, *, unless: Callable[[], bool] | None = None) -> T | None:
        """Takes the oldest item; blocks while there is none, or gives None then as soon as `unless` holds.

        Raises:
            Halted: the queue is closed; items still waiting are not given out any more.
        """
        with self._changed:
            while not self._items and not self._closed:
                if unless is not None and unless():
                    return None
                self._changed.wait(None if unless is None else LOOK_S)
            if self._closed:
                raise Halted
            item = self._items.popleft()
            self._changed.notify_all()
        self._tell()
        return item

    def take(self, limit: int | None = None) -> list[T]:
        """Takes what is there, or up to `limit` of it, closed or not, without blocking; oldest first."""
        with self._changed:
            if limit is None or len(self._items) <= limit:
                items = list(self._items)
                self._items.clear()
            else:
                items = [self._items.popleft() for _ in range(limit)]
            self._changed.notify_all()
        return items

    def close(self) -> None:
        """Makes `put` and `get` raise Halted, those that wait already included."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change()
