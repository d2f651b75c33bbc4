"""ReplayStore: the ring, its writers and what each has committed, and what was drawn."""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from dase_grpc.errors import MalformedError, SequenceGapError, TooManyWritersError, WriterForgottenError
from dase_grpc.progress import MAX_AGENT_ID, MAX_PAIRED_AGENTS
from dase_grpc.replay.buffer.priorities import Priorities, Prioritisation
from dase_grpc.replay.buffer.ring import RingBuffer
from dase_grpc.schema import Array, TransitionSchema

MAX_WRITERS = 4096
MAX_AGENT_WRITERS = 256
MAX_WRITER_BYTES = 512
FORGOTTEN_AT_ONCE = 64
"""Writers that make room at once; as many Insert streams as an agent may have."""
NOT_FINITE = "not_finite"

WriterKey = tuple[int, str]
"""Agent id and name."""

GONE_AFTER_S: Final = 900.0
"""How long a writer without a stream is kept; a client gives up after 600 s as a rule (--replay-timeout)."""


@dataclass
class Traffic:
    """Running totals by collecting agent, and over all agents, so that nobody has to sum K² pairs.

    Keys of `refused` are (agent, reason), of `sampled` (sampling agent, collecting agent), both below
    MAX_PAIRED_AGENTS.
    """

    inserted: Counter[int] = field(default_factory=Counter)
    refused: Counter[tuple[int, str]] = field(default_factory=Counter)
    sampled: Counter[tuple[int, int]] = field(default_factory=Counter)
    inserted_total: int = 0
    refused_total: int = 0
    sampled_total: int = 0

    def count_sampled(self, agent_id: int, owners: npt.NDArray[np.int32]) -> None:
        """Counts transitions drawn for an agent, by who collected them."""
        self.sampled_total += len(owners)
        if agent_id >= MAX_PAIRED_AGENTS:
            return
        for source, drawn in enumerate(np.bincount(owners)[:MAX_PAIRED_AGENTS].tolist()):
            if drawn:
                self.sampled[agent_id, source] += drawn

    def restore(self, inserted: Sequence[int], refused: Sequence[int]) -> None:
        """Goes on from these totals by agent id; what was sampled is counted from each start."""
        self.inserted = Counter({agent: count for agent, count in enumerate(inserted) if count})
        self.refused = Counter({(agent, NOT_FINITE): count for agent, count in enumerate(refused) if count})
        self.inserted_total = self.inserted.total()
        self.refused_total = self.refused.total()


class WriterWatch:
    """Which writers have streams, and since when those without have none; `now` is monotonic, in seconds.

    Rows come over streams that the service has answered, so those of a writer without one cannot arrive
    until it opens another. Writers that nothing is known of have had none since `began`.
    """

    def __init__(self, *, began: float = 0.0) -> None:
        self.began = began
        self._streams: Counter[WriterKey] = Counter()
        self._ended: dict[WriterKey, float] = {}
        self._left: set[WriterKey] = set()

    def opened(self, writer: WriterKey) -> None:
        """Notes that a stream of a writer begins."""
        self._streams[writer] += 1

    def closed(self, writer: WriterKey, now: float) -> None:
        """Notes that one has ended."""
        self._streams[writer] -= 1
        if not self._streams[writer]:
            del self._streams[writer]
            self._ended[writer] = now

    def leave(self, writer: WriterKey) -> None:
        """Notes that a writer has said that it sends nothing more."""
        self._left.add(writer)

    def forget(self, writer: WriterKey) -> None:
        """Lets go of what is known of a writer."""
        self._ended.pop(writer, None)
        self._left.discard(writer)

    def gone(self, writers: Iterable[WriterKey], now: float) -> list[WriterKey]:
        """Those that are gone: first those that have left, then the longest gone."""
        since = {each: self._since(each) for each in writers if each not in self._streams}
        return sorted((each for each in since if now - since[each] >= GONE_AFTER_S), key=since.__getitem__)

    def _since(self, writer: WriterKey) -> float:
        return -math.inf if writer in self._left else self._ended.get(writer, self.began)


class ReplayStore:
    """A ring of transitions that stores each sequence number of a writer exactly once.

    Single-threaded; nothing blocks.

    Attributes:
        watch: which writers have streams; those that are gone make room for new ones.
        forgotten: how many writers have, ever.
    """

    def __init__(self, ring: RingBuffer, *, max_writers: int = MAX_WRITERS) -> None:
        self.ring = ring
        self.traffic = Traffic()
        self.priorities: dict[int, Priorities] = {}
        self._max_writers = max_writers
        self._most_at_once = sys.maxsize
        self._committed: dict[WriterKey, int] = {}
        self.watch = WriterWatch()
        self.forgotten = 0

    @property
    def schema(self) -> TransitionSchema:
        """The layout of the rows."""
        return self.ring.schema

    def priorities_of(
        self, agent_id: int, how: Prioritisation | None, *, own_share: float | None
    ) -> Priorities | None:
        """An agent's priorities, kept from one stream to the next that draws in the same way.

        Without `how` the agent has none, and those that it had are gone.
        """
        kept = self.priorities.pop(agent_id, None)
        if how is None:
            return None
        if kept is None or (kept.how, kept.own_share) != (how, own_share):
            kept = Priorities(self.ring, agent_id, how, own_share=own_share)
        self.priorities[agent_id] = kept
        return kept

    def committed(self, writer: str, *, agent_id: int) -> int:
        """The last sequence number that this writer of the agent has committed, 0 if none."""
        return self._committed.get((agent_id, writer), 0)

    def make_room(self, writer: str, *, agent_id: int, now: float) -> None:
        """Forgets writers that are gone where there is no room for this one."""
        if (agent_id, writer) in self._committed:
            return
        ours = [key for key in self._committed if key[0] == agent_id]
        if len(ours) >= MAX_AGENT_WRITERS:
            gone = self.watch.gone(ours, now)
        elif len(self._committed) >= self._max_writers:
            gone = self.watch.gone(self._committed, now)
        else:
            return
        if gone:
            self.forget(gone[:FORGOTTEN_AT_ONCE])

    def forget(self, writers: Sequence[WriterKey]) -> None:
        """Takes what these writers have committed out of the table; their transitions stay."""
        for key in writers:
            del self._committed[key]
            self.watch.forget(key)
        self.forgotten += len(writers)

    def require_remembered(self, writer: str, *, agent_id: int, forgotten: int) -> None:
        """Checks that a writer was not forgotten since `forgotten` writers had been."""
        if (agent_id, writer) not in self._committed and forgotten != self.forgotten:
            raise WriterForgottenError(
                f"writer {writer!r} of agent {agent_id} was away for so long that it may have been "
                f"forgotten, and what it would send again may be stored already; start its node again"
            )

    def append(self, writer: str, first_seq: int, rows: Array, *, agent_id: int, commit: bool = True) -> int:
        """Stores the rows this writer has not committed yet; returns how many were refused.

        Without `commit` it is for the caller to call that before it tells anybody that they are stored.
        Writers belong to their agent: two agents may each have one of the same name. rows is (N, width)
        float32, numbered from first_seq on. Rows already committed are skipped, so resending is safe. A row
        with a value that is not finite is refused by itself: counted, not stored, its number committed. O(N).

        Raises:
            SequenceGapError: first_seq is beyond the next expected number.
            MalformedError: first_seq is below 1, the writer's name is too long, the agent id impossible,
                or a row carries another agent id than the writer's; nothing is stored.
            TooManyWritersError: the writer is new, and the table is full or the agent's share of it.
        """
        committed = self.committed(writer, agent_id=agent_id)
        self._require_next(writer, first_seq, committed)
        is_new = (agent_id, writer) not in self._committed
        if is_new:
            self._require_name(writer, agent_id)
        fresh = rows[committed + 1 - first_seq :]
        if not len(fresh):  # else whoever sends nothing under many names fills the table
            return 0
        if is_new:
            self._require_room(writer, agent_id)
        if (self.schema.agent_ids(fresh) != agent_id).any():
            raise MalformedError(
                f"writer {writer!r} sent transitions of another agent than its own, {agent_id}"
            )
        refused = 0
        for start in range(0, len(fresh), self._most_at_once):
            part = fresh[start : start + self._most_at_once]
            refused += self._store(part, agent_id)
            committed += len(part)
            self._committed[agent_id, writer] = committed
            self._note(writer, agent_id, len(part))
        if commit:
            self.commit()
        return refused

    def commit(self) -> None:
        """Makes all that was appended outlive the process, where the store can; here that is nothing."""

    def _require_next(self, writer: str, first_seq: int, committed: int) -> None:
        if first_seq < 1:
            raise MalformedError(f"writer {writer!r} sent row {first_seq}, but rows are numbered from 1")
        if first_seq > committed + 1:
            raise SequenceGapError(
                f"writer {writer!r} sent row {first_seq}, but row {committed + 1} comes next; "
                f"resend from {committed + 1}"
            )

    def _require_name(self, writer: str, agent_id: int) -> None:
        if not 0 <= agent_id <= MAX_AGENT_ID:
            raise MalformedError(f"agent id {agent_id} of writer {writer!r} is outside 0..{MAX_AGENT_ID}")
        if len(writer.encode(errors="surrogatepass")) > MAX_WRITER_BYTES:
            raise MalformedError(
                f"the name of writer {writer[:20]!r}... has more than {MAX_WRITER_BYTES} bytes; shorten it"
            )

    def _require_room(self, writer: str, agent_id: int) -> None:
        if sum(agent == agent_id for agent, _ in self._committed) >= MAX_AGENT_WRITERS:
            raise TooManyWritersError(
                f"agent {agent_id} has {MAX_AGENT_WRITERS} writers, as many as one may have, so writer "
                f"{writer!r} cannot be added; one that ended without saying so is forgotten after "
                f"{GONE_AFTER_S:g} s"
            )
        if len(self._committed) >= self._max_writers:
            raise TooManyWritersError(
                f"the table of {self._max_writers} writers is full, so writer {writer!r} cannot be added; "
                f"one that ended without saying so is forgotten after {GONE_AFTER_S:g} s"
            )

    def _note(self, writer: str, agent_id: int, count: int) -> None:
        """Called once `count` rows that the writer sent are stored, and its number is."""

    def _store(self, rows: Array, agent_id: int) -> int:
        finite = self.schema.finite(rows)
        refused = len(rows) - int(np.count_nonzero(finite))
        if refused:
            rows = rows[finite]
        self.ring.append(rows)
        self.traffic.inserted[agent_id] += len(rows)
        self.traffic.inserted_total += len(rows)
        if refused:
            self.traffic.refused[agent_id, NOT_FINITE] += refused
            self.traffic.refused_total += refused
        return refused
