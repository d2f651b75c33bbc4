"""The shared buffer on disk: what is committed outlives the process, what is synced outlives power.

Rows lie in a memory-mapped ring with spare slots, so that rows which are not committed yet never lie on
rows that the latest commit record claims. Rows are put first, then one of two alternating commit records
(ledger.py). A killed process leaves all its puts to the kernel, in order, so the newest whole record is
right. A machine that stops may have written any of the mapped pages and not others, so there, known by
another boot id, the newest synced record is right: it is written only after its rows are on the disk, and
says which of them later rows may have been written over. The same goes for a disk that has refused a sync:
from then on nothing is claimed, and the next start takes the newest synced record.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

from dase_grpc.errors import CapacityError
from dase_grpc.replay.buffer import ledger
from dase_grpc.replay.buffer.directory import (
    COMMITS,
    FILE_BYTES,
    LEASES,
    ROWS,
    BufferIdentity,
    DataDirectory,
    stored_identity,
)
from dase_grpc.replay.buffer.ledger import FORGOTTEN, RETIRED, CommitFile, Committed
from dase_grpc.replay.buffer.mapped import MappedFile, Reservation, StrictFile, require_size
from dase_grpc.replay.buffer.ring_file import MappedRing, spare_slots
from dase_grpc.replay.buffer.store import MAX_WRITERS, NOT_FINITE, ReplayStore, WriterKey
from dase_grpc.schema import Array, TransitionSchema

NO_LIMIT: Final = 2**62

WRITER_PLACES: Final = MAX_WRITERS + 1
"""In the table of writers on disk; one counts those that were forgotten."""


@dataclass(frozen=True)
class Recovery:
    """What a start found: how many transitions, and whether the machine had stopped since they came.

    So it counts where the disk had refused a sync. `unsure` of the transitions that the record names are
    left out because later ones may have been written over them.
    """

    transitions: int
    writers: int
    machine_stopped: bool
    unsure: int = 0


class DurableStore(ReplayStore):
    """A ReplayStore whose commits outlive the process. Lives on one thread.

    An append of more rows than the spare slots take is committed in parts. Several appends may be committed
    as one; what the spare slots do not take is committed before the next one. `append` blocks only when more
    rows come between two syncs than the synced record foresees: then for one write of a record.
    `recovery` is what was found, None for a new buffer.
    """

    def __init__(self, identity: BufferIdentity, rows: StrictFile, commits: CommitFile) -> None:
        ring = MappedRing(identity.schema, identity.capacity, rows)
        super().__init__(ring, max_writers=identity.max_writers - 1)
        self.identity = identity
        self.recovery: Recovery | None = None
        self._most_at_once = identity.spare
        self._mapped, self._rows, self._commits = ring, rows, commits
        rows.on_refusal = commits.distrust
        self._index: dict[WriterKey, int] = {}
        self._retired: list[int] = []  # places of writers that were forgotten; the disk may not know it yet
        self._vacant: list[int] = []  # those that it knows of
        self._state = Committed(agents=0, writers=0)
        self._present = ring.present(0)
        self._uncommitted = 0  # rows that were put after the latest commit record
        self._limit = 0  # no transition of this number or a higher one may be put before a record says so
        self._next_limit = 0
        self._unsettled = False  # the latest synced record may not be on the disk yet
        self._synced_total = 0
        self._synced_number = 0

    @classmethod
    def create(
        cls,
        directory: DataDirectory,
        identity: BufferIdentity,
        *,
        boot_id: str,
        reserved: Reservation | None = None,
    ) -> Self:
        """A new, empty buffer; else a CapacityError, and nothing is left.

        Its space on the disk is `reserved`, see `reserve_rows`, or is now.
        """
        directory.discard()
        with ExitStack() as opened:
            with _refused(directory, identity):
                rows = StrictFile.of(reserved or reserve_rows(directory, identity))
                opened.callback(rows.close)
                commits = CommitFile.create(directory.path / COMMITS, identity.max_writers)
                opened.callback(commits.close)
                store = cls(identity, rows, commits)
                commits.commits.write(store._packed())
                commits.put_synced(identity.spare, store._packed())
                commits.put_boot(boot_id)
                store._flush()
                directory.put_identity(identity)
            opened.pop_all()
        store._limit = identity.spare
        return store

    @classmethod
    def open(cls, directory: DataDirectory, identity: BufferIdentity, *, boot_id: str) -> Self:
        """The buffer that lies in a directory; in milliseconds, unless the machine had stopped."""
        with ExitStack() as opened:
            rows = StrictFile.open(directory.path / ROWS, rows_bytes(identity))
            opened.callback(rows.close)
            commits = CommitFile.open(directory.path / COMMITS, identity.max_writers)
            opened.callback(commits.close)
            store = cls(identity, rows, commits)
            store._recover(boot_id)
            opened.pop_all()
        return store

    def sync(self, *, last: bool = False) -> Iterator[Callable[[], None]]:
        """Brings all that is committed now to the disk.

        Yields the calls that block: run each, in any thread, before taking the next. Appends may go on
        in between, unless this is the last time. Does nothing if the disk has everything.

        Raises:
            DataDirectoryError: the disk refuses (raised by a call), or has refused before.
        """
        self._require_disk()
        self.commit()
        number, total = self._commits.commits.number, self.ring.total
        window = 0 if last else max(self.identity.spare, 2 * (total - self._synced_total))
        if number == self._synced_number and self._limit <= total + window:
            return
        packed, retired = self._packed(), tuple(self._retired)
        yield self._flush
        if self._synced_number > number:  # `forget` has brought a newer one to the disk meanwhile
            return
        self._unsettled = False
        self._claim(packed, total, self.ring.total + window, again=False)
        yield self._commits.sync
        self._settle()
        self._synced_number = max(self._synced_number, number)
        known = [place for place in retired if place in self._retired]
        self._vacant += known
        self._retired = [place for place in self._retired if place not in known]

    def close(self) -> None:
        """Brings everything to the disk, for as long as that takes, and closes the files in any case.

        Raises:
            DataDirectoryError: the disk refuses, or has refused before; then nothing is tried.
        """
        try:
            self._sync_now(last=True)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the files as they are, as the end of the process would."""
        self._mapped.close()
        self._commits.close()

    def commit(self) -> None:
        """Makes all that was appended outlive the process."""
        if self._uncommitted:
            self._put_commit()

    def forget(self, writers: Sequence[WriterKey]) -> None:
        """Takes these writers out of the table, on the disk as well; blocks for as long as `sync` does."""
        if FORGOTTEN not in self._index and len(self._state.sequences) == self.identity.max_writers:
            return  # a full table of a version that kept no place for the count
        super().forget(writers)
        if FORGOTTEN not in self._index:
            self._add_writer(FORGOTTEN)
        for key in writers:
            index = self._index.pop(key)
            self._state.sequences[index] = RETIRED
            self._retired.append(index)
        self._state.sequences[self._index[FORGOTTEN]] = self.forgotten
        self._put_commit()
        self._sync_now()  # makes their places free for others

    def _sync_now(self, *, last: bool = False) -> None:
        for blocking in self.sync(last=last):
            blocking()

    def _require_room(self, writer: str, agent_id: int) -> None:
        super()._require_room(writer, agent_id)
        if not self._vacant and len(self._state.sequences) == self.identity.max_writers:
            self._sync_now()

    def _put_commit(self) -> None:
        self._count_present()
        self._commits.commits.write(self._state.bytes)
        self._uncommitted = 0

    def _note(self, writer: str, agent_id: int, count: int) -> None:
        key = agent_id, writer
        index = self._index.get(key)
        if index is None:
            index = self._add_writer(key)
        state, traffic = self._state, self.traffic
        state.sequences[index] = self._committed[key]
        state.inserted[agent_id] = traffic.inserted[agent_id]
        state.refused[agent_id] = traffic.refused[agent_id, NOT_FINITE]
        self._uncommitted += count

    def _add_writer(self, writer: WriterKey) -> int:
        places, (agent_id, name) = len(self._state.sequences), writer
        index = self._vacant.pop() if self._vacant else places
        self._commits.put_writer(index, agent_id, name)
        self._index[writer] = index
        self._grow(max(len(self._present), agent_id + 1), max(places, index + 1))
        return index

    def _grow(self, agents: int, writers: int) -> None:
        self._state = self._state.grown(agents, writers)
        self._present = self._mapped.present(agents)

    def _count_present(self) -> None:
        state, ring = self._state, self.ring
        state.head[0] = ring.total
        state.head[1] = len(ring)
        state.present[:] = self._present

    def _store(self, rows: Array, agent_id: int) -> int:
        if self._uncommitted + len(rows) > self.identity.spare:
            self.commit()
        if self.ring.total + len(rows) > self._limit:
            self._extend(self.ring.total + len(rows))
        return super()._store(rows, agent_id)

    def _packed(self) -> bytes:
        """All that is committed, but for the rows and the names of the writers."""
        self._count_present()
        return bytes(self._state.bytes)

    def _require_disk(self) -> None:
        self._rows.require_disk()
        self._commits.require_disk()

    def _flush(self) -> None:
        self._rows.sync()
        self._commits.sync()

    def _claim(self, packed: bytes, total: int, limit: int, *, again: bool) -> None:
        """Puts a synced record, whose limit holds with the one before until it is on the disk."""
        self._require_disk()
        if limit - self.identity.slots >= total:
            limit = NO_LIMIT  # none of its rows is sure anyway
        self._commits.put_synced(limit, packed, again=again)
        self._synced_total = total
        self._limit, self._next_limit = min(self._limit, limit), limit
        self._unsettled = True

    def _settle(self) -> None:
        self._limit = self._next_limit
        self._unsettled = False

    def _extend(self, wanted: int) -> None:
        """Makes the synced record foresee four times as many rows as it has to."""
        _, packed = self._commits.synced_state()
        total = self._synced_total
        self._claim(packed, total, total + 4 * (wanted - total), again=self._unsettled)
        self._commits.sync()
        self._settle()

    def _recover(self, boot_id: str) -> None:
        self._commits.put_again()
        self._commits.sync()  # so that the latest synced record is the one on the disk, too
        self._limit, packed = self._commits.synced_state()
        synced = Committed.unpack(packed)
        self._next_limit, self._synced_total = self._limit, int(synced.head[0])
        latest = self._commits.commits.latest if self._commits.same_boot(boot_id) else None
        state = synced if latest is None else Committed.unpack(latest)
        self._restore(state)
        self.recovery = Recovery(state.size, len(self._committed), machine_stopped=latest is None)
        if latest is None:
            self._drop_unsure(state)
            self._commits.commits.write(self._packed())
            self._commits.put_boot(boot_id)

    def _restore(self, state: Committed) -> None:
        self._mapped.restore(state)
        self._state = state
        self._grow(len(state.present), len(state.sequences))
        self._index = self._commits.writers(state.sequences)
        self._retired = np.flatnonzero(state.sequences == RETIRED).tolist()
        self._committed = {key: int(state.sequences[index]) for key, index in self._index.items()}
        self.forgotten = self._committed.pop(FORGOTTEN, 0)
        self.traffic.restore(state.inserted.tolist(), state.refused.tolist())

    def _drop_unsure(self, state: Committed) -> None:
        sure = min(state.size, max(0, int(state.head[0]) - max(0, self._limit - self.identity.slots)))
        if sure < state.size:
            self._mapped.shorten(sure)
        self.recovery = Recovery(sure, len(self._committed), machine_stopped=True, unsure=state.size - sure)


def rows_bytes(identity: BufferIdentity) -> int:
    """The size of a buffer's file of rows."""
    return identity.slots * identity.schema.row_bytes


def reserve_rows(directory: DataDirectory, identity: BufferIdentity) -> Reservation:
    """Reserves the space of a buffer's rows: all of `DurableStore.create` that may take long.

    For any thread. CapacityError where the disk refuses.
    """
    with _refused(directory, identity):
        reserved = Reservation.make(directory.path / ROWS, rows_bytes(identity))
        try:
            os.fdatasync(reserved.descriptor)  # what was written to reserve it; later that would take as long
        except BaseException:
            reserved.drop()
            raise
    return reserved


@contextmanager
def _refused(directory: DataDirectory, identity: BufferIdentity) -> Iterator[None]:
    """Makes one sentence of what the disk has against a new buffer, and leaves nothing of it there."""
    try:
        yield
    except (OSError, OverflowError) as error:
        directory.discard()
        why = getattr(error, "strerror", None) or "too large"
        raise CapacityError(
            f"{directory.path} cannot take {identity.capacity} transitions of {identity.schema.row_bytes} "
            f"bytes, {rows_bytes(identity) / 2**20:,.1f} MiB in all ({why}); free space there, or lower "
            f"replay.capacity"
        ) from None


def reserved_bytes(schema: TransitionSchema, capacity: int) -> int:
    """The size of all files of a data directory for `capacity` transitions, but for some text."""
    rows = (capacity + spare_slots(schema)) * schema.row_bytes
    return rows + ledger.file_bytes(WRITER_PLACES) + FILE_BYTES


@dataclass(frozen=True)
class BufferState:
    """What lies in a data directory, as of the last commit or, after the machine has stopped, the last sync.

    So it counts where the disk has refused a sync. A start may leave out some of the oldest transitions then.
    Writers that were forgotten do not count.
    """

    identity: BufferIdentity
    transitions: int
    writers: int
    machine_stopped: bool


def inspect(path: Path, *, boot_id: str, to_go_on: bool = False) -> BufferState | None:
    """The buffer in a data directory; None where there is none.

    Takes and changes nothing, also while a replay works on it. Checked are the check sums of buffer.json,
    of the latest records and of the writers' names, and the sizes of all files. Rows carry none, and of the
    leases a start takes what is whole. `to_go_on` checks as well that all files may be written to; else it is
    enough if they may be read, and of the leases, which are for their owner alone, not even that.
    """
    identity = stored_identity(path)
    if identity is None:
        return None
    MappedFile.open(path / ROWS, rows_bytes(identity), writable=to_go_on).close()
    leases = path / LEASES
    if leases.exists():  # else a start makes it
        require_size(leases, leases.stat().st_size, FILE_BYTES)
        if to_go_on:
            MappedFile.open(leases, FILE_BYTES).close()
    commits = CommitFile.open(path / COMMITS, identity.max_writers, writable=to_go_on)
    try:
        _, packed = commits.synced_state()
        latest = commits.commits.latest if commits.same_boot(boot_id) else None
        state = Committed.unpack(packed if latest is None else latest)
        writers = commits.writers(state.sequences).keys() - {FORGOTTEN}
        return BufferState(identity, state.size, len(writers), machine_stopped=latest is None)
    finally:
        commits.close()
