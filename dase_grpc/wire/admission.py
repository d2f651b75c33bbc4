"""How many streams the agents of a run may have open at a service, and what these may hold in memory."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dase_grpc.errors import OverloadedError

MAX_AGENT_STREAMS: Final = 64
"""Streams of one kind that one agent may have open: its learner, its actors, and some that died unnoticed."""

MAX_AGENT_HELD_BYTES: Final = 256 * 2**20
MAX_HELD_BYTES: Final = 2**30


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
