"""A small schema, rows that can be told apart by a serial number, and the buffer in memory and on file."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dase_grpc.replay.buffer.directory import BufferIdentity, DataDirectory
from dase_grpc.replay.buffer.durable import DurableStore
from dase_grpc.replay.buffer.mapped import MappedFile
from dase_grpc.replay.buffer.ring import RingBuffer
from dase_grpc.replay.buffer.ring_file import MappedRing
from dase_grpc.replay.buffer.store import ReplayStore
from dase_grpc.schema import Array, TransitionSchema

SCHEMA = TransitionSchema("worlds:PointGoal", 2, 1, (-1.0,), (1.0,))
WIDER = TransitionSchema("worlds:PointGoal", 3, 1, (-1.0,), (1.0,))


def rows_of(serials: Sequence[int], agents: Sequence[int] | int, schema: TransitionSchema = SCHEMA) -> Array:
    """One row for each serial number, which every float column but the last holds."""
    rows = schema.empty(len(serials))
    rows[:, : schema.float_width] = np.asarray(serials, np.float32)[:, np.newaxis]
    rows[:, schema.columns["bootstrap"]] = 1.0
    schema.agent_ids(rows)[:] = agents
    rows[:, schema.columns["policy_version"].start].view(np.uint32)[:] = serials
    return rows


def serials_of(rows: Array) -> list[int]:
    """The serial numbers of rows, each checked to be whole."""
    versions = rows[:, SCHEMA.columns["policy_version"].start].view(np.uint32)
    assert (rows[:, : SCHEMA.float_width - 1] == versions[:, np.newaxis]).all()
    return [int(version) for version in versions]


BACKENDS = {"memory": None, "file, 1 spare": 1, "file, 5 spare": 5, "file, 1000 spare": 1_000}
"""Where rows lie, and how many spare slots a file has."""


def ring_on(backend: str, capacity: int, schema: TransitionSchema = SCHEMA) -> RingBuffer:
    """A ring in memory, or in a file that ends with it."""
    spare = BACKENDS[backend]
    if spare is None:
        return RingBuffer(schema, capacity)
    with tempfile.TemporaryDirectory() as directory:
        file = MappedFile.create(Path(directory) / "rows", (capacity + spare) * schema.row_bytes)
        file.close()  # the map stays
        return MappedRing(schema, capacity, file)


def identity_of(capacity: int, *, spare: int = 5, max_writers: int = 3) -> BufferIdentity:
    """What a small buffer on disk is."""
    return BufferIdentity("the-buffer", "the-run", capacity, spare, max_writers + 1, SCHEMA)


@contextmanager
def store_on(backend: str, capacity: int, *, max_writers: int) -> Iterator[ReplayStore]:
    """A store in memory, or in a directory that ends with the block."""
    spare = BACKENDS[backend]
    if spare is None:
        yield ReplayStore(RingBuffer(SCHEMA, capacity), max_writers=max_writers)
        return
    with tempfile.TemporaryDirectory() as path:
        directory = DataDirectory.open(Path(path))
        identity = identity_of(capacity, spare=spare, max_writers=max_writers)
        store = DurableStore.create(directory, identity, boot_id="this boot")
        yield store
        store.close()
        directory.close()
