"""Whether the disk has room for the buffers of all cells that an experiment may have there at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dase_grpc.capacity import transitions
from dase_grpc.errors import ConfigError
from dase_grpc.launch.experiments.matrix import Cell
from dase_grpc.launch.machine import free_disk, shown_size
from dase_grpc.launch.storage import keeps_on_disk
from dase_grpc.replay.buffer.directory import ROWS
from dase_grpc.schema import TransitionSchema
from dase_grpc.store.footprint import reserved_bytes


def require_disk(
    cells: Sequence[Cell], schemas: Mapping[str, TransitionSchema], root: Path, *, jobs: int, kept: bool
) -> None:
    """Checks that the buffers of the clusters among `cells`, which are still to run, find room below `root`.

    Each takes its whole size from its start on; one that is there already takes nothing more. Those that
    may run at once count, the largest ones, or all of them where finished cells keep theirs.

    Args:
        cells: those that have not finished.
        schemas: the layout of each cell's transitions, by its name.
        root: the experiment's folder.
        jobs: how many cores are kept busy.
        kept: whether the buffers of finished cells stay.

    Raises:
        ConfigError: the disk has no room.
    """
    waiting = [cell for cell in cells if cell.mode == "cluster" and keeps_on_disk(cell.config)]
    if not waiting:
        return
    at_once = len(waiting) if kept else max(1, jobs // min(cell.weight for cell in waiting))
    sizes = sorted((_missing(cell, schemas[cell.name], root) for cell in waiting), reverse=True)[:at_once]
    wanted, free = sum(sizes), free_disk(root)
    if wanted > free:
        why = "cells that finish keep theirs" if kept else f"up to {len(sizes)} run at once"
        raise ConfigError(
            f"the cells' buffers take {shown_size(wanted)} of disk in {root} ({why}), and {shown_size(free)} "
            f"are free; free space there, lower replay.capacity or --jobs, or set replay.storage = 'memory'"
        )


def _missing(cell: Cell, schema: TransitionSchema, root: Path) -> int:
    """What a cell's buffer has still to take."""
    if (root / cell.name / "replay" / ROWS).exists():
        return 0
    return reserved_bytes(schema, transitions(cell.config.replay.capacity, row_bytes=schema.row_bytes))
