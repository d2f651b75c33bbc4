"""Data directories on disks that are full or cannot be written."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from contracts.sentences import refuses
from patience import PATIENCE_S
from replay.buffer.runs_on_disk import Runs, join
from store_cases import rows_of

from dase_grpc.errors import CapacityError, DataDirectoryError


@pytest.mark.parametrize("capacity", [10**13, 10**18, 10**29])
def test_a_buffer_beyond_the_disk_is_refused_with_its_size_and_a_smaller_one_is_made_after(runs, capacity):
    run = runs.start(capacity=capacity)
    with refuses(CapacityError, str(runs.path), "MiB", "free space there"):
        join(run)
    assert run.leases.all() == []
    assert sorted(path.name for path in runs.path.iterdir()) == ["leases", "lock"]
    runs.close(run)
    join(runs.start(capacity=10))


FULL_DISK = """
import sys
from pathlib import Path
import replay.buffer.runs_on_disk as cases
runs = cases.Runs(Path(sys.argv[1]))
try:
    cases.join(runs.start(capacity=int(sys.argv[2])))
except cases.DaseError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(error.exit_code)
"""


def start_with_files_up_to(size: int, path: Path, *, capacity: int) -> subprocess.CompletedProcess[str]:
    """Starts and joins in a process whose files may have at most so many bytes."""
    code = FULL_DISK.replace("cases.DaseError", "__import__('dase_grpc.errors').errors.DaseError")
    return subprocess.run(
        [sys.executable, "-c", code, str(path), str(capacity)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )


@pytest.mark.parametrize(
    ("limit", "error", "code"), [(2**20, "DataDirectoryError", 2), (2**24, "CapacityError", 3)]
)
@pytest.mark.slow
def test_where_files_may_not_grow_there_is_one_sentence_and_afterwards_all_is_well(runs, limit, error, code):
    """A limit stands for a full disk: first the leases do not fit, then the rows do not."""
    answer = start_with_files_up_to(limit, runs.path, capacity=1_000_000)
    assert (answer.returncode, answer.stderr) == (code, "")
    assert answer.stdout.startswith(f"{error}: {runs.path}")
    assert answer.stdout.count("\n") == 1
    assert start_with_files_up_to(2**30, runs.path, capacity=1_000_000).returncode == 0


def test_a_full_disk_is_said_in_one_sentence_and_once_there_is_space_the_next_join_works(small_disk):
    runs = Runs(small_disk / "data")
    (small_disk / "other").write_bytes(bytes(13 * 2**20))
    run = runs.start(capacity=20_000)
    with refuses(CapacityError, "No space left on device", "free space there"):
        join(run)
    (small_disk / "other").unlink()
    join(run)
    (small_disk / "other").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    for start in range(20):  # the space of every row is reserved, so a disk that is full now harms nobody
        run.store.append("w", 1 + 2_000 * start, rows_of(range(2_000), 0), agent_id=0)
    runs.kill(run)
    again = runs.start(capacity=20_000)
    assert len(again.store.ring) == 20_000
    runs.close(again)


def test_the_first_start_on_a_full_disk_ends_with_one_sentence(small_disk):
    (small_disk / "other").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    runs = Runs(small_disk / "data")
    with refuses(DataDirectoryError):
        runs.start()
    (small_disk / "other").unlink()
    join(runs.start(capacity=10))
    runs.close(runs.started[0])
