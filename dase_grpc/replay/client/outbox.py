"""Outbox: rows that a writer has handed to its Insert stream, until their commit is known."""

from collections import deque
from collections.abc import Callable, Iterator

from dase_grpc.errors import DaseError
from dase_grpc.schema import Array


class Outbox:
    """Numbers a writer's rows and keeps each until it is acknowledged, so that it can be sent again.

    A row keeps its number over all streams to the same buffer, for the service drops by number what it
    has. It gets another one only when the service has lost committed rows, or holds another buffer.
    `count` is told how many rows are acknowledged, whenever some are.
    """

    def __init__(self, *, count: Callable[[int], None] = lambda rows: None) -> None:
        self._count = count
        self._blocks: deque[Array] = deque()
        self._first = 1
        self._next = 1
        self._buffer_id: str | None = None
        self.acknowledged = 0

    def __len__(self) -> int:
        """Rows that are kept."""
        return self._next - self._first

    def add(self, rows: Array) -> None:
        """Keeps (N, width) rows, numbered on from the last."""
        self._blocks.append(rows)
        self._next += len(rows)

    def blocks(self) -> Iterator[Array]:
        """The rows that are kept, oldest first, as they were when this was called."""
        yield from tuple(self._blocks)

    def resume(self, committed_seq: int, *, buffer_id: str) -> int:
        """Begins a stream, the service having committed everything up to `committed_seq` of this writer.

        What is kept then are the rows to send, numbered from `committed_seq` + 1. Returns how many
        acknowledged rows the service has lost; 0 where it holds another buffer than before.

        Raises:
            DaseError: the service has rows of this writer that it never sent.
        """
        lost, same = self._first - 1 - committed_seq, buffer_id == self._buffer_id
        self._buffer_id = buffer_id
        if same and committed_seq >= self._next:
            raise DaseError(
                f"the replay service has row {committed_seq} of this writer, which sent only "
                f"{self._next - 1}: another node writes under the same name"
            )
        if same and lost <= 0:
            self.acknowledge(committed_seq)
            return 0
        self._next -= lost
        self._first -= lost
        return lost if same else 0

    def acknowledge(self, committed_seq: int) -> None:
        """Lets go of all rows up to `committed_seq`.

        Raises:
            DaseError: no row of that number was ever sent.
        """
        if committed_seq >= self._next:
            raise DaseError(
                f"the replay service acknowledged row {committed_seq}, but only {self._next - 1} were sent"
            )
        due = max(0, committed_seq + 1 - self._first)
        self._first += due
        self.acknowledged += due
        self._count(due)
        while due:
            block = self._blocks.popleft()
            if len(block) > due:
                self._blocks.appendleft(block[due:])
            due -= min(due, len(block))
