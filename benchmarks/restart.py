"""How long a killed durable buffer takes to go on, by its size: the store alone, without a process's start.

Each buffer is filled with 176-byte transitions, let go as the end of its process would, and opened again.

Usage: python benchmarks/restart.py [--sizes 100000 1000000 10000000] [--data-dir DIR]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from dase_grpc.process.ends import boot_id
from dase_grpc.replay.buffer.directory import BufferIdentity, DataDirectory
from dase_grpc.replay.buffer.durable import DurableStore
from dase_grpc.schema import TransitionSchema

SCHEMA = TransitionSchema("narrow", 17, 6, (-1.0,) * 6, (1.0,) * 6)
CHUNK = 10_000
STARTS = 5


def restart_ms(path: Path, size: int) -> list[float]:
    """Milliseconds of a few starts on a full buffer of `size` transitions."""
    identity = BufferIdentity("buffer", "run", size, CHUNK, 4_096, SCHEMA)
    directory = DataDirectory.open(path)
    store = DurableStore.create(directory, identity, boot_id=boot_id())
    rows = np.zeros((CHUNK, SCHEMA.width), np.float32)
    for first in range(1, size + 1, CHUNK):
        store.append("writer", first, rows, agent_id=0)
    times = []
    for _ in range(STARTS):
        store.abandon()
        directory.close()
        started = time.perf_counter()
        directory = DataDirectory.open(path)
        found = directory.identity()
        if found is None:
            raise SystemExit(f"{path} holds no buffer")
        store = DurableStore.open(directory, found, boot_id=boot_id())
        times.append(1e3 * (time.perf_counter() - started))
        if len(store.ring) != size or store.ring.size_by_agent != {0: size}:
            raise SystemExit(f"{len(store.ring)} transitions were found, not {size}")
    store.abandon()
    directory.close()
    return times


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--data-dir", type=Path, help="make the buffers in a new folder there")
    options = parser.parse_args()
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.data_dir) as directory:
            times = restart_ms(Path(directory), size)
        print(
            f"{size:>12,} transitions, {size * SCHEMA.row_bytes / 2**20:>8,.0f} MiB: "
            f"{statistics.median(times):.1f} ms (median of {STARTS}), {max(times):.1f} ms at most"
        )


if __name__ == "__main__":
    main()
