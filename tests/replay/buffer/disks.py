"""A process that dies between any two bytes it puts into a file, and a machine that loses power."""

import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from dase_grpc.errors import DataDirectoryError
from dase_grpc.replay.buffer.mapped import MappedFile

SECTOR = 16


class Died(BaseException):
    """The process was killed."""


@dataclass
class Dying:
    """Counts what is put into files; dies in the middle of one put, if told of which."""

    at_put: int | None = None
    after_share: float = 0.0
    puts: int = 0

    def before(self, data: bytes | memoryview) -> int:
        """How many bytes of these still go in; all of them unless this is the put to die in."""
        self.puts += 1
        return len(data) if self.at_put != self.puts - 1 else int(self.after_share * len(data))


@contextmanager
def dying(at_put: int | None, after_share: float = 0.0) -> Iterator[Dying]:
    """Inside the block, put number `at_put` (from 0) stops after a share of its bytes and raises Died."""
    state, put = Dying(at_put, after_share), MappedFile.put

    def stopping(file: MappedFile, offset: int, data: bytes | memoryview) -> None:
        kept = state.before(data)
        put(file, offset, data[:kept])
        if state.at_put == state.puts - 1:
            raise Died

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedFile, "put", stopping)
        yield state


@dataclass
class Disk:
    """What would be on the disk of a machine that loses power, for every mapped file.

    `synced` is a file's content when it was last synced; of what was put later, each sector (a few bytes
    here) may have reached the disk or not, in any of its states since, independently of all others.

    The disk `refuses` the next syncs of files of these names, each once, as Linux tells it: some of what was
    put later is on the disk then, and the kernel forgets that the rest is not.
    """

    rng: np.random.Generator
    refuses: set[str] = field(default_factory=set)
    synced: dict[Path, bytes] = field(default_factory=dict)
    later: dict[Path, dict[int, list[bytes]]] = field(default_factory=lambda: defaultdict(dict))

    def note_put(self, file: MappedFile, offset: int, size: int) -> None:
        states = self.later[file.path]
        for sector in range(offset // SECTOR, -(-(offset + size) // SECTOR)):
            states.setdefault(sector, []).append(bytes(file.bytes[sector * SECTOR :][:SECTOR]))

    def note_sync(self, file: MappedFile) -> None:
        image = bytearray(self.synced.get(file.path, bytes(len(file.bytes))))
        refused = file.path.name in self.refuses
        for sector, versions in self.later[file.path].items():
            version = int(self.rng.integers(-1, len(versions))) if refused else -1
            if version >= 0 or not refused:
                image[sector * SECTOR : sector * SECTOR + len(versions[version])] = versions[version]
        self.synced[file.path] = bytes(image)
        self.later[file.path].clear()
        if refused:
            self.refuses.remove(file.path.name)
            raise DataDirectoryError(f"{file.path} cannot be written to its disk (of a test)")

    def restart(self, directory: Path) -> None:
        """Forgets everything but what lies in `directory`."""
        self.synced = {path: path.read_bytes() for path in directory.iterdir()}
        self.later.clear()

    def after_power_loss(self, directory: Path, target: Path, rng: np.random.Generator) -> None:
        """Makes `target` a directory as a machine without power may leave it."""
        target.mkdir()
        for path in directory.iterdir():
            states = self.later.get(path, {})
            if path not in self.synced and not states:
                shutil.copy(path, target)
                continue
            image = bytearray(self.synced.get(path, bytes(path.stat().st_size)))
            for sector, versions in states.items():
                version = int(rng.integers(-1, len(versions)))
                if version >= 0:
                    image[sector * SECTOR : sector * SECTOR + len(versions[version])] = versions[version]
            (target / path.name).write_bytes(image)


@contextmanager
def watched_disk(rng: np.random.Generator | None = None) -> Iterator[Disk]:
    """Inside the block, keeps what would be on the disk, and waits for no real one."""
    disk, put = Disk(np.random.default_rng(0) if rng is None else rng), MappedFile.put

    def noting_put(file: MappedFile, offset: int, data: bytes | memoryview) -> None:
        put(file, offset, data)
        disk.note_put(file, offset, len(data))

    def noting_sync(file: MappedFile) -> None:
        disk.note_sync(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedFile, "put", noting_put)
        patch.setattr(MappedFile, "sync", noting_sync)
        patch.setattr("os.fsync", lambda descriptor: None)
        yield disk
