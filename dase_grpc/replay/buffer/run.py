"""One run's shared state: leases, policies, and the buffer that the first learner brings about."""

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dase_grpc.errors import (
    BufferGoneError,
    CapacityError,
    DaseError,
    DataDirectoryError,
    NotJoinedError,
    RunMismatchError,
    SchemaMismatchError,
)
from dase_grpc.pace import StepLimiter
from dase_grpc.replay.buffer.directory import BufferIdentity, DataDirectory, LeaseFile
from dase_grpc.replay.buffer.durable import WRITER_PLACES, DurableStore, Recovery, reserve_rows, rows_bytes
from dase_grpc.replay.buffer.leases import AttendanceBook, Lease, LeaseTable
from dase_grpc.replay.buffer.mapped import Reservation
from dase_grpc.replay.buffer.policies import PolicyBoard
from dase_grpc.replay.buffer.ring import transitions_in
from dase_grpc.replay.buffer.ring_file import ring_in_memory, spare_slots
from dase_grpc.replay.buffer.sharding import WHOLE, Shard
from dase_grpc.replay.buffer.store import ReplayStore
from dase_grpc.schema import TransitionSchema

MAX_NAME = 100
"""Characters of a name that a client sent which a refusal repeats."""

SHOWN = 8
"""Characters of a fingerprint that a refusal shows."""


class SharedRun:
    """What the replay node holds, in memory or, with `keep_in`, in a data directory. Single-threaded.

    The service knows no environment: the first learner to join states the schema, which fixes the
    width of the rows and so, for a capacity in bytes, the number of transitions. Nothing blocks in
    memory; on disk making the buffer does, but for `reservation`, and every join and leave for one write to
    the disk.

    Attributes:
        incarnation: random, another one at each start.
        limiters: of the agents whose learners have said a pace.
        in_place: how many streams of each agent read rows in place.
        shard: which part of a sharded replay it is; `capacity` is its own, `min_size` of all together.
    """

    def __init__(
        self,
        run_id: str,
        *,
        capacity: int | str,
        min_size: int,
        seed: int,
        ttl_s: float,
        shard: Shard = WHOLE,
    ) -> None:
        self.run_id = run_id
        self.shard = shard
        self.min_size = min_size
        self.seed = seed
        self.incarnation = secrets.token_hex(8)
        self.leases = LeaseTable(ttl_s=ttl_s)
        self.attendance = AttendanceBook(ttl_s=ttl_s)
        self.policies = PolicyBoard()
        self.limiters: dict[int, StepLimiter] = {}
        self.in_place: Counter[int] = Counter()
        self._capacity = capacity
        self._store: ReplayStore | None = None
        self._disk: _Disk | None = None
        self._reserved: Reservation | None = None
        self._reserving = threading.RLock()
        self._closed = False

    def keep_in(self, data_dir: Path, *, boot_id: str, now: float) -> Self:
        """Has the buffer and the leases outlive the process; goes on from what the directory holds.

        A lease that was held may be renewed by its holder for `ttl_s` from `now` as if nothing had
        happened; only then can another node have the agent id.
        """
        with ExitStack() as opened:
            directory = DataDirectory.open(data_dir)
            opened.callback(directory.close)
            identity = directory.identity()
            if identity is not None:
                self._require_same(identity, data_dir)
            leases = LeaseFile.open(directory)
            opened.callback(leases.close)
            if identity is not None:
                self._store = DurableStore.open(directory, identity, boot_id=boot_id)
                self._store.watch.began = now
            ttl_s = self.leases.ttl_s
            self.leases = LeaseTable(ttl_s=ttl_s, restored=leases.read(now=now, ttl_s=ttl_s), keep=leases.put)
            self._disk = _Disk(directory, leases, boot_id)
            opened.pop_all()
        return self

    @property
    def opened(self) -> bool:
        """Whether a learner has joined, so that there is a schema and a buffer."""
        return self._store is not None

    @property
    def store(self) -> ReplayStore:
        """The buffer; a NotJoinedError before the first learner has joined."""
        if self._store is None:
            raise NotJoinedError(f"run {self.run_id!r} has no schema yet: no learner has joined")
        return self._store

    @property
    def buffer_id(self) -> str | None:
        """Names a buffer on disk for as long as it exists; None in memory and before the first join."""
        return self._store.identity.buffer_id if isinstance(self._store, DurableStore) else None

    @property
    def data_id(self) -> str:
        """Names the transitions and leases: those on disk outlive the process, those in memory do not."""
        return self.buffer_id or self.incarnation

    @property
    def recovery(self) -> Recovery | None:
        """What was found on disk; None in memory, and where nothing was found."""
        return self._store.recovery if isinstance(self._store, DurableStore) else None

    def sync(self) -> Iterator[Callable[[], None]]:
        """See DurableStore.sync; nothing in memory. The disk may have refused a lease, too."""
        if self._disk is not None:
            self._disk.leases.require_disk()
        if isinstance(self._store, DurableStore):
            yield from self._store.sync()

    def close(self) -> None:
        """Brings everything to the disk and lets the data directory go, also where the disk refuses."""
        if self._disk is None:
            return
        with ExitStack() as closing:
            closing.callback(self._disk.leases.require_disk)
            closing.callback(self._disk.directory.close)
            closing.callback(self._disk.leases.close)
            closing.callback(self._drop_reserved, for_good=True)
            if isinstance(self._store, DurableStore):
                self._store.close()

    def reservation(self, schema: TransitionSchema, *, run_id: str) -> Callable[[], None] | None:
        """What reserves space on the disk for the buffer that the first to join brings about, if anything.

        For any thread. It may take minutes, see Reservation; until it returns nobody may `join`, and `close`
        waits. Raises as `join`, when it is asked for and when it runs.
        """
        if run_id:
            self.require_run(run_id)
        if self._store is not None or self._disk is None:
            return None
        directory, identity = self._disk.directory, self._identity(schema)
        if self._reserved is not None and self._reserved.size == rows_bytes(identity):
            return None

        def reserve() -> None:
            with self._reserving:
                self._drop_reserved()
                if not self._closed:
                    self._reserved = reserve_rows(directory, identity)

        return reserve

    def join(
        self,
        node_name: str,
        *,
        wanted: int | None,
        run_id: str,
        schema: TransitionSchema,
        now: float,
        node_id: str = "",
        ended: str = "",
    ) -> Lease:
        """Leases an agent id, see LeaseTable.join; the first to join opens the buffer with its schema."""
        if run_id:
            self.require_run(run_id)
        if self._store is not None:
            self._store.schema.require_equal(schema)
            return self.leases.join(node_name, wanted, now, node_id=node_id, ended=ended)
        store = self._make_store(schema)
        try:
            lease = self.leases.join(node_name, wanted, now, node_id=node_id, ended=ended)
        except DaseError:  # a node that is refused must not decide the schema
            self._discard(store)
            raise
        self._store = store
        return lease

    def require_run(self, run_id: str) -> None:
        """Checks that a client means this run."""
        if run_id != self.run_id:
            raise RunMismatchError(
                f"this service holds run_id = {self.run_id!r}, the client asks for {run_id[:MAX_NAME]!r}; "
                f"leave --run-id out, or name the run that is here"
            )

    def require_data(self, buffer_id: str) -> None:
        """Checks that a client means the transitions and leases that are here; an empty id means any.

        In memory epochs begin anew with each start, so without this a lease of an earlier start could
        pass for one of now.
        """
        if buffer_id and buffer_id != self.data_id:
            raise BufferGoneError(
                f"this service holds buffer {self.data_id}, the client means {buffer_id[:MAX_NAME]!r}: the "
                f"service came back without its transitions and leases; join again"
            )

    def require_stream(
        self, *, run_id: str, agent_id: int, epoch: int, fingerprint: str, buffer_id: str = ""
    ) -> ReplayStore:
        """The buffer, for a stream whose run, data, schema and lease, as it states them, are those of now."""
        self.require_run(run_id)
        self.require_data(buffer_id)
        self.require_reader(run_id=run_id, fingerprint=fingerprint)
        self.leases.require(agent_id, epoch)
        return self.store

    def require_reader(self, *, run_id: str, fingerprint: str) -> None:
        """Checks that a stream that needs no lease means this run and its schema."""
        self.require_run(run_id)
        schema = self.store.schema
        if fingerprint != schema.fingerprint:
            raise SchemaMismatchError(
                f"this run's environment is {schema.environment}, and this node's is another or has other "
                f"sizes or bounds (schema_fingerprint {schema.fingerprint[:SHOWN]}, of this node "
                f"{fingerprint[:SHOWN] or 'none'}); start it with the settings of the learners"
            )

    def _make_store(self, schema: TransitionSchema) -> ReplayStore:
        if self._disk is None:
            ring = ring_in_memory(schema, self._capacity)
            self._require_min_size(ring.capacity, schema)
            return ReplayStore(ring)
        identity, reserved = self._identity(schema), self._reserved
        if reserved is not None and reserved.size != rows_bytes(identity):
            self._drop_reserved()
            reserved = None
        self._reserved = None
        disk = self._disk
        return DurableStore.create(disk.directory, identity, boot_id=disk.boot_id, reserved=reserved)

    def _identity(self, schema: TransitionSchema) -> BufferIdentity:
        """That of a new buffer."""
        capacity = transitions_in(self._capacity, row_bytes=schema.row_bytes)
        self._require_min_size(capacity, schema)
        return BufferIdentity(
            buffer_id=secrets.token_hex(8),
            run_id=self.run_id,
            capacity=capacity,
            spare=spare_slots(schema),
            max_writers=WRITER_PLACES,
            schema=schema,
            shard=self.shard,
        )

    def _drop_reserved(self, *, for_good: bool = False) -> None:
        with self._reserving:
            self._closed |= for_good
            reserved, self._reserved = self._reserved, None
            if reserved is not None:
                reserved.drop()

    def _discard(self, store: ReplayStore) -> None:
        if self._disk is not None and isinstance(store, DurableStore):
            store.abandon()
            self._disk.directory.discard()

    def _require_min_size(self, capacity: int, schema: TransitionSchema) -> None:
        shards = self.shard.count
        if self.min_size > capacity * shards:
            kept = f"replay.capacity = {self._capacity} holds"
            if shards > 1:
                kept = f"{shards} shards of replay.capacity = {self._capacity} hold"
            raise CapacityError(
                f"replay.min_size = {self.min_size} exceeds the {capacity * shards} transitions of "
                f"{schema.row_bytes} bytes that {kept}"
            )

    def _require_same(self, stored: BufferIdentity, data_dir: Path) -> None:
        """Refuses a data directory that holds something else than was asked for."""
        wanted = transitions_in(self._capacity, row_bytes=stored.schema.row_bytes)
        for same, held, flag in (
            (stored.run_id == self.run_id, f"run_id = {stored.run_id!r}, not {self.run_id!r}", "--run-id"),
            (stored.shard == self.shard, f"shard {stored.shard} of the replay, not {self.shard}", "--shard"),
            (
                stored.capacity == wanted,
                f"a buffer of capacity {stored.capacity}, not {wanted} ({self._capacity})",
                "--capacity",
            ),
        ):
            if not same:
                raise DataDirectoryError(
                    f"{data_dir} holds {held}; leave {flag} out, or choose another directory"
                )
        self._require_min_size(stored.capacity, stored.schema)


@dataclass(frozen=True)
class _Disk:
    """Where a run is kept."""

    directory: DataDirectory
    leases: LeaseFile
    boot_id: str
