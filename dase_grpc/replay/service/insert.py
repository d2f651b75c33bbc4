"""The acknowledgements of one Insert stream: cumulative, and one for many commits of a fast writer."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from dase_grpc.replay.wire.status import Context
from dase_grpc.replay.wire.v1 import replay_pb2

ACK_ROWS: Final = 1_024
"""Rows whose acknowledgement goes out at once."""

ACK_EVERY_S: Final = 0.002
"""How often fewer are acknowledged at most. One acknowledgement for each chunk of 256 rows would take a third
of the processor time of both sides; to wait where chunks come seldom would wake the service once more."""


class Acknowledger:
    """Tells a writer what is committed, and commits it before. `run` must run in a task of the stream.

    So what comes between two acknowledgements is one commit: for small chunks that of each would take a
    tenth of the server's time.
    """

    def __init__(
        self,
        context: Context,
        *,
        stored_seq: int,
        commit: Callable[[], None],
        forgotten: Callable[[], int] = lambda: 0,
    ) -> None:
        self._context = context
        self._forgotten = forgotten
        self._commit = commit
        self._answer = replay_pb2.InsertResponse(committed_seq=stored_seq)
        self._sent_seq = stored_seq
        self._due = asyncio.Event()
        self._urgent = asyncio.Event()
        self._due.set()
        self._urgent.set()

    def stored(self, seq: int, *, refused: int) -> None:
        """Notes that everything up to `seq` is stored, `refused` more rows of it as refused."""
        self._answer.committed_seq = seq
        self._answer.waiting = ""
        self._answer.refused_rows += refused
        self._due.set()
        if seq - self._sent_seq >= ACK_ROWS:
            self._urgent.set()

    def waiting(self, reason: str) -> None:
        """Has the writer told what its next rows wait for."""
        self._answer.waiting = reason
        self._due.set()

    def finish(self) -> None:
        """Lets `run` send the last acknowledgement and return."""
        self._answer.finished = True
        self._due.set()
        self._urgent.set()

    async def run(self) -> None:
        """Sends what the writer starts from, and then what is due, until the last acknowledgement."""
        loop, finished, next_at = asyncio.get_running_loop(), False, 0.0
        while not finished:
            await self._due.wait()
            if next_at > loop.time():
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_at):
                        await self._urgent.wait()
            next_at = loop.time() + ACK_EVERY_S
            self._due.clear()
            self._urgent.clear()
            self._commit()
            self._sent_seq = self._answer.committed_seq
            finished = self._answer.finished
            self._answer.forgotten_writers = self._forgotten()
            await self._context.write(self._answer)
