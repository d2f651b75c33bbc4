"""How much disk a buffer takes, all of it reserved before the first transition."""

from dase_grpc.replay.buffer import ledger
from dase_grpc.replay.buffer.durable import SPARE_BYTES, WRITER_PLACES
from dase_grpc.schema import TransitionSchema
from dase_grpc.store import lease_file


def spare_slots(schema: TransitionSchema) -> int:
    """Rows that lie beside the capacity, for those that are not committed yet."""
    return max(1, SPARE_BYTES // schema.row_bytes)


def reserved_bytes(schema: TransitionSchema, capacity: int) -> int:
    """The size of all files of a data directory for `capacity` transitions, but for some text."""
    rows = (capacity + spare_slots(schema)) * schema.row_bytes
    return rows + ledger.file_bytes(WRITER_PLACES) + lease_file.FILE_BYTES
