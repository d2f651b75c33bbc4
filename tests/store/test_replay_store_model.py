"""ReplayStore against a model: in memory, on file, on file with kills anywhere, and with power losses."""

import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from disks import Died, dying, watched_disk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from store_cases import identity_of, serials_of
from writers import AGENT, CAPACITY, WRITERS, Writers, writers

from dase_grpc.store.directory import DataDirectory
from dase_grpc.store.durable import DurableStore

SPARES = (1, 2, 5, 40)


@dataclass
class Snapshot:
    """What was committed at one moment."""

    committed: dict[str, int]
    inserted: Counter[int]
    refused: Counter[tuple[int, str]]
    present: list[tuple[int, int]]


class WritersOnDisk(Writers):
    """The same writers, on a store that is closed and opened again, and whose process is killed."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.disk = self.stack.enter_context(watched_disk())
        self.root = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.path = self.root / "0"
        self.boot = 0
        self.spare = SPARES[0]
        self.syncing: Iterator[Callable[[], None]] | None = None
        super().__init__()
        self.sure, self.maybe = self.snapshot(), list[Snapshot]()

    def make_store(self) -> DurableStore:
        self.directory = DataDirectory.open(self.path)
        identity = identity_of(CAPACITY, spare=self.spare, max_writers=len(WRITERS))
        return DurableStore.create(self.directory, identity, boot_id=str(self.boot))

    @initialize(spare=st.sampled_from(SPARES))
    def choose(self, spare: int) -> None:
        self.let_go()
        self.spare = spare
        self.store = self.make_store()

    @rule(writer=writers, data=st.data(), at_put=st.integers(0, 7), share=st.floats(0, 1))
    def die_while_sending(self, writer: str, data: st.DataObject, at_put: int, share: float) -> None:
        """Afterwards there is what was there before, or a whole part of the chunk more."""
        log, before = self.logs[writer], self.committed[writer]
        first = data.draw(st.integers(1, before + 1), label="first_seq")
        last = data.draw(st.integers(first - 1, len(log)), label="last_seq")
        rows = self._rows(writer, log[first - 1 : last])
        with dying(at_put, share) as state:
            try:
                self.store.append(writer, first, rows, agent_id=AGENT[writer])
                finished = True
            except Died:
                finished = False
        self.restart()
        found, last = self.store.committed(writer, agent_id=AGENT[writer]), max(before, last)
        assert found == last if finished else found in {*range(before, last, self.spare), last}
        assert finished == (state.puts <= at_put)
        if found > before:
            self.note(writer, found)

    @rule(at_put=st.integers(0, 6) | st.none(), share=st.floats(0, 1))
    def die_in_between(self, at_put: int | None, share: float) -> None:
        """A killed process finds everything, even if it is killed while it looks."""
        self.let_go()
        with dying(at_put, share):
            try:
                self.store = self.open()
            except Died:
                self.directory.close()
        self.restart()

    @rule()
    def close(self) -> None:
        self.store.close()
        self.directory.close()
        self.syncing, self.sure, self.maybe = None, self.snapshot(), []
        self.store = self.open()

    @rule(steps=st.integers(1, 4), at_put=st.integers(0, 4) | st.none(), share=st.floats(0, 1))
    def sync(self, steps: int, at_put: int | None, share: float) -> None:
        """Goes on with bringing everything to the disk, and may die of it."""
        with dying(at_put, share):
            try:
                for _ in range(steps):
                    self.sync_once()
            except Died:
                self.restart()

    def sync_once(self) -> None:
        if self.syncing is None:
            self.syncing = self.store.sync()
            self.maybe.append(self.snapshot())
        blocking = next(self.syncing, None)
        if blocking is not None:
            blocking()
        else:
            self.syncing, self.sure, self.maybe = None, self.maybe[-1], []

    def snapshot(self) -> Snapshot:
        return Snapshot(dict(self.committed), self.inserted.copy(), self.refused.copy(), list(self.present))

    def open(self) -> DurableStore:
        self.directory = DataDirectory.open(self.path)
        identity = self.directory.identity()
        assert identity is not None
        store = DurableStore.open(self.directory, identity, boot_id=str(self.boot))
        self.drawn.clear()
        return store

    def let_go(self) -> None:
        """What the kernel does for a process that was killed."""
        self.store.abandon()
        self.directory.close()
        self.syncing = None

    def restart(self) -> None:
        self.let_go()
        self.store = self.open()
        assert self.store.recovery is not None
        assert not self.store.recovery.machine_stopped

    def teardown(self) -> None:
        self.let_go()
        self.stack.close()


class WritersWithoutPower(WritersOnDisk):
    """The same, on a machine that loses power."""

    @rule(seed=st.integers(0, 2**32), data=st.data(), writer=writers, at_put=st.integers(0, 7) | st.none())
    def lose_power(self, seed: int, data: st.DataObject, writer: str, at_put: int | None) -> None:
        """Afterwards there is what was last synced, but for its oldest, if later ones may lie on them."""
        if at_put is not None and len(self.logs[writer]) > self.committed[writer]:
            rows = self._rows(writer, self.logs[writer][self.committed[writer] :])
            with dying(at_put, 0.5), suppress(Died):
                self.store.append(writer, self.committed[writer] + 1, rows, agent_id=AGENT[writer])
        self.restart_without_power(
            np.random.default_rng(seed), dies_at=data.draw(st.none() | st.integers(0, 5))
        )
        (found,) = [each for each in self.candidates() if self.is_like(each)][:1]
        present = serials_of(self.store.ring.ordered())
        before = [serial for serial, _ in found.present]
        recovery = self.store.recovery
        assert recovery is not None
        assert recovery.machine_stopped
        assert before[recovery.unsure :] == present
        self.committed, self.inserted, self.refused = (
            dict(found.committed),
            found.inserted.copy(),
            found.refused.copy(),
        )
        self.present = deque(found.present[recovery.unsure :], maxlen=CAPACITY)
        self.known = {name for name, seq in self.committed.items() if seq}
        self.sure, self.maybe = self.snapshot(), []

    def candidates(self) -> list[Snapshot]:
        return [*reversed(self.maybe), self.sure]

    def is_like(self, snapshot: Snapshot) -> bool:
        committed = {name: self.store.committed(name, agent_id=AGENT[name]) for name in WRITERS}
        return committed == snapshot.committed and self.store.traffic.inserted == snapshot.inserted

    def restart_without_power(self, rng: np.random.Generator, *, dies_at: int | None) -> None:
        """Starts again on what the disk has kept, maybe killed while it looks for the first time."""
        self.let_go()
        self.boot += 1
        target = self.root / str(self.boot)
        self.disk.after_power_loss(self.path, target, rng)
        shutil.rmtree(self.path)
        self.path = target
        self.disk.restart(target)
        with dying(dies_at, 0.5):
            try:
                self.store = self.open()
            except Died:
                self.directory.close()
            else:
                return
        self.store = self.open()


def machine(cls: type[Writers], *, examples: int) -> type:
    """The test case of a machine."""
    case = cls.TestCase
    case.settings = settings(deadline=None, max_examples=examples, stateful_step_count=30)
    return case


TestInMemory = machine(Writers, examples=60)
TestOnDisk = machine(WritersOnDisk, examples=60)
TestWithoutPower = machine(WritersWithoutPower, examples=60)
