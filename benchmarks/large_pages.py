"""Measures what large pages bring a ring in memory: filling it, and gathering batches from it.

    python benchmarks/large_pages.py [--quick] [--mib 64 280 1000] [--turns 5] [--seconds 1] \
        [--results FILE.csv | --show FILE.csv]

A ring of each size is filled from its begin on with pages as a replay takes them, and with small ones, in
turns; then batches of 256 rows drawn at random are gathered from a second mapping, which may only read, as a
learner on the replay's machine does. Wide rows are those of Humanoid, narrow ones of HalfCheetah.
"""

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from measuring import (
    TASKS,
    Entry,
    Figure,
    Round,
    answer,
    conditions,
    markdown,
    median,
    ratios,
    take_turns,
    values,
)

from dase_grpc.replay.buffer.large_pages import LargePages
from dase_grpc.replay.buffer.mapped import MappedFile
from dase_grpc.schema import Array, TransitionSchema

BATCH: Final = 256
MIB: Final = 2**20
PIECE: Final = 64 * 2**10
"""Bytes that a message brings."""

SMALL, LARGE = "small pages", "large pages"
FILLING, GATHERING = "filled, MiB/s", "batches of 256/s"


@contextmanager
def filled(size: int, *, large: bool) -> Iterator[Callable[[], memoryview]]:
    """A file in memory with every byte written; gives what maps it to be read only."""
    file = MappedFile.in_memory(size) if large else in_small_pages(size)
    try:
        fill(file, size)
        yield (
            lambda: (
                LargePages(file.descriptor, size, writable=False).bytes
                if large
                else memoryview(mmap.mmap(file.descriptor, size, prot=mmap.PROT_READ))
            )
        )
    finally:
        file.close()


def in_small_pages(size: int) -> MappedFile:
    """A file in memory that takes what pages the kernel gives by itself."""
    descriptor = os.memfd_create("small")
    os.ftruncate(descriptor, size)
    return MappedFile(Path(), descriptor, memoryview(mmap.mmap(descriptor, size)))


def fill(file: MappedFile, size: int) -> None:
    """Puts a message after the other into a file."""
    piece = os.urandom(PIECE)
    for begin in range(0, size, PIECE):
        file.put(begin, piece[: size - begin])


def filling(size: int, seconds: float, *, large: bool) -> Round:
    """Fills files again and again."""
    done, spent_s = 0, 0.0
    while spent_s < seconds:
        began = time.perf_counter()
        with filled(size, large=large):
            spent_s += time.perf_counter() - began
        done += 1
    return Round(done * size // MIB, spent_s, 0.0, 0.0)


def gathering(rows: Array, seconds: float) -> Round:
    """Gathers batches of rows drawn at random."""
    rng, done, spent_s = np.random.default_rng(0), 0, 0.0
    while spent_s < seconds:
        drawn = rng.integers(0, len(rows), (64, BATCH))
        began = time.perf_counter()
        for numbers in drawn:
            rows.take(numbers, axis=0)
        spent_s += time.perf_counter() - began
        done += len(drawn)
    return Round(done, spent_s, 0.0, 0.0)


def measured(task: str, mib: int, *, turns: int, seconds: float) -> list[Figure]:
    """One size of ring, of one task's rows."""
    schema = TransitionSchema("", *TASKS[task], (-1.0,) * TASKS[task][1], (1.0,) * TASKS[task][1])
    slots = mib * MIB // schema.row_bytes
    size, kinds = slots * schema.row_bytes, {SMALL: False, LARGE: True}
    play = partial(take_turns, subject=f"{task}, {mib:,} MiB", turns=turns, seconds=seconds)
    found = play(
        [Entry(who, partial(filling, size, large=large)) for who, large in kinds.items()], what=FILLING
    )
    with filled(size, large=False) as small, filled(size, large=True) as large:
        rows = [np.frombuffer(view(), np.float32).reshape(slots, -1) for view in (small, large)]
        entries = [Entry(who, partial(gathering, each)) for who, each in zip(kinds, rows, strict=True)]
        return found + play(entries, what=GATHERING)


def measure(given: argparse.Namespace) -> list[Figure]:
    """All sizes of both tasks."""
    if given.quick:
        given.mib, given.turns, given.seconds = [8], 1, 0.01
    return [
        figure
        for task in TASKS
        for mib in given.mib
        for figure in measured(task, mib, turns=given.turns, seconds=given.seconds)
    ]


def tables(found: Sequence[Figure]) -> str:
    """A line for each size, with the middle of the ratios by turns."""
    head, lines = ["rows", *[f"{what}: small, large, ratio" for what in (FILLING, GATHERING)]], []
    for subject in dict.fromkeys(figure.subject for figure in found):
        cells = []
        for what in (FILLING, GATHERING):
            small, large = (values(found, subject=subject, what=what, who=who) for who in (SMALL, LARGE))
            ratio = statistics.median(ratios(large, small))
            cells.append(f"{median(small):,.0f}, {median(large):,.0f}, {ratio:.2f}")
        lines.append([subject, *cells])
    return f"{conditions(found)}\n\n{markdown(head, lines)}"


def main() -> None:
    """Measures, or shows what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one tiny ring of each task")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 280, 1000], metavar="N")
    parser.add_argument("--turns", type=int, default=5, metavar="N")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S")
    answer(parser, measure, tables)


if __name__ == "__main__":
    main()
