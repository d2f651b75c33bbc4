"""Insert streams at the service: acknowledgements, and how many streams an agent may have open."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dase_grpc.errors import OverloadedError
from dase_grpc.replay.wire.status import Context
from dase_grpc.replay.wire.v1 import replay_pb2

ACK_ROWS: Final = 1_024
"""Rows whose acknowledgement goes out at once."""

ACK_EVERY_S: Final = 0.002
"""How often fewer are acknowledged at most. One acknowledgement for each chunk of 256 rows would take a third
of the processor time of both sides; to wait where chunks come seldom would wake the service once more."""

MAX_AGENT_STREAMS: Final = 64
"""Streams of one kind that one agent may have open: its learner, its actors, and some that died unnoticed."""

MAX_AGENT_HELD_BYTES: Final = 256 * 2**20
MAX_HELD_BYTES: Final = 2**30


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


class Admission:
    """Counts the open streams of one kind. A stream is admitted for as long as the block lasts.

    `held_bytes` is what a stream can make the service hold: a batch, while its client does not read.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._streams: Counter[int] = Counter()
        self._held: Counter[int] = Counter()

    @contextmanager
    def stream(self, agent_id: int, *, held_bytes: int = 0) -> Iterator[None]:
        """Admits a stream of an agent.

        Raises:
            OverloadedError: the agent has too many, or they and this one could hold too much.
        """
        self._require_room(agent_id, held_bytes)
        self._streams[agent_id] += 1
        self._held[agent_id] += held_bytes
        try:
            yield
        finally:
            self._held[agent_id] -= held_bytes
            self._streams[agent_id] -= 1
            if not self._streams[agent_id]:
                del self._streams[agent_id], self._held[agent_id]

    def _require_room(self, agent_id: int, held_bytes: int) -> None:
        if self._streams[agent_id] >= MAX_AGENT_STREAMS:
            raise OverloadedError(
                f"agent {agent_id} has {MAX_AGENT_STREAMS} {self._what} streams open, as many as the service "
                f"takes; end some"
            )
        for held, limit, whose in (
            (self._held[agent_id], MAX_AGENT_HELD_BYTES, f"of agent {agent_id}"),
            (self._held.total(), MAX_HELD_BYTES, "of all agents"),
        ):
            if held + held_bytes > limit:
                raise OverloadedError(
                    f"the batches of open {self._what} streams {whose} would take {held + held_bytes} bytes, "
                    f"over the limit of {limit}; end some streams, or ask for smaller batches"
                )
