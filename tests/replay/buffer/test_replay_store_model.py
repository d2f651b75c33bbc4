"""ReplayStore against a model: in memory, and on file with kills between any two bytes."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from disks import Died, dying, watched_disk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from store_cases import identity_of
from writers import AGENT, CAPACITY, WRITERS, Writers, writers

from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import DurableStore

SPARES = (1, 2, 5, 40)


class WritersOnDisk(Writers):
    """The same writers, on a store that is closed and opened again, and whose process is killed."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(watched_disk())
        self.path = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.spare = SPARES[0]
        self.syncing: Iterator[Callable[[], None]] | None = None
        super().__init__()

    def make_store(self) -> DurableStore:
        self.directory = DataDirectory.open(self.path)
        identity = identity_of(CAPACITY, spare=self.spare, max_writers=len(WRITERS))
        return DurableStore.create(self.directory, identity, boot_id="this boot")

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

    @precondition(lambda self: self.known)
    @rule(data=st.data(), at_put=st.integers(0, 12), share=st.floats(0, 1))
    def die_while_forgetting(self, data: st.DataObject, at_put: int, share: float) -> None:
        """Afterwards it is known as before, or forgotten and counted."""
        writer = data.draw(st.sampled_from(sorted(self.known)), label="writer")
        with dying(at_put, share):
            try:
                self.store.forget([(AGENT[writer], writer)])
                finished = True
            except Died:
                finished = False
        self.restart()
        assert self.store.forgotten in {self.forgotten + 1, self.forgotten + finished}
        if self.store.forgotten > self.forgotten:
            self.note_forgotten(writer)

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
        self.syncing = None
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
        blocking = next(self.syncing, None)
        if blocking is None:
            self.syncing = None
        else:
            blocking()

    def open(self) -> DurableStore:
        self.directory = DataDirectory.open(self.path)
        identity = self.directory.identity()
        assert identity is not None
        store = DurableStore.open(self.directory, identity, boot_id="this boot")
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


def machine(cls: type[Writers], *, examples: int) -> type:
    """The test case of a machine."""
    case = cls.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=30)
    return case


TestInMemory = machine(Writers, examples=60)
TestOnDisk = pytest.mark.slow(machine(WritersOnDisk, examples=60))
