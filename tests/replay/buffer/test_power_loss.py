"""A buffer on disk after power was lost, or the disk refused: what is there is whole and synced."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from disks import Died, Disk, dying, watched_disk
from store_cases import SCHEMA, identity_of, rows_of, serials_of

from dase_grpc.errors import DataDirectoryError
from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import DurableStore
from dase_grpc.replay.buffer.store import WriterKey

CAPACITY = 9
WRITERS = 3


@dataclass(frozen=True)
class Moment:
    """What was committed once: transitions, each writer's last sequence number, the forgotten."""

    total: int
    committed: frozenset[tuple[WriterKey, int]]
    forgotten: int


class Machine:
    """Three agents write serial numbers 0, 1, 2, ... into one buffer; then the power goes.

    The table of writers has room for one of each agent, so one that comes after another was forgotten has
    that one's place.
    """

    def __init__(self, root: Path, disk: Disk, rng: np.random.Generator, *, spare: int) -> None:
        self.root, self.disk, self.rng, self.spare = root, disk, rng, spare
        self.boot = 0
        self.directory = DataDirectory.open(self.path)
        identity = identity_of(CAPACITY, spare=spare, max_writers=WRITERS)
        self.store = DurableStore.create(self.directory, identity, boot_id=self.boot_id)
        self.syncing: Iterator[Callable[[], None]] | None = None
        self.blocking: Callable[[], None] | None = None
        self.history = list[tuple[int, int]]()
        self.lost = 0  # transitions before this one are not there
        self.sure, self.maybe = self.moment(), list[Moment]()
        self.synced = self.sure

    @property
    def path(self) -> Path:
        return self.root / str(self.boot)

    @property
    def boot_id(self) -> str:
        return f"boot {self.boot}"

    def moment(self) -> Moment:
        return Moment(self.store.ring.total, frozenset(self.writers.items()), self.store.forgotten)

    @property
    def writers(self) -> dict[WriterKey, int]:
        """The whole table: each writer's last sequence number."""
        return self.store._committed

    def write(self, agent: int | None = None) -> None:
        agent = int(self.rng.integers(WRITERS)) if agent is None else agent
        count = int(self.rng.integers(1, 6))
        serials = range(len(self.history), len(self.history) + count)
        writer = next((name for of, name in self.writers if of == agent), f"the writer of {serials[0]}")
        seq = self.store.committed(writer, agent_id=agent) + 1
        freed, before = len(self.store._retired), self.moment()
        if freed:  # their places may be needed, and are brought to the disk before
            self.maybe.append(before)
        self.store.append(writer, seq, rows_of(serials, agent), agent_id=agent)
        if len(self.store._retired) < freed:
            self.sure, self.maybe = before, []
        self.history += [(serial, agent) for serial in serials]

    def forget(self, agent: int | None = None) -> None:
        """Forgets a writer; that is on the disk before anything else is."""
        keys = sorted(key for key in self.writers if agent in {None, key[0]})
        if not keys:
            return
        key, before = keys[int(self.rng.integers(len(keys)))], self.moment()
        after = before.committed - {(key, self.writers[key])}
        self.maybe += [before, Moment(before.total, after, before.forgotten + 1)]
        self.store.forget([key])
        self.sure, self.maybe = self.moment(), []

    def sync_once(self) -> None:
        """Runs the call that blocks, or goes on to the next one, so that much can happen in between."""
        if self.blocking is not None:
            self.blocking()
            self.blocking = None
            return
        if self.syncing is None:
            self.syncing, self.synced = self.store.sync(), self.moment()
            self.maybe.append(self.synced)
        try:
            self.blocking = next(self.syncing, None)
        except DataDirectoryError:
            self.syncing = None
            raise
        if self.blocking is None:
            self.syncing = None
            if self.synced in self.maybe:  # else something newer has been brought to the disk meanwhile
                self.sure, self.maybe = self.synced, []

    def let_go(self) -> None:
        self.store.abandon()
        self.directory.close()
        self.syncing = self.blocking = None

    def open(self) -> None:
        self.directory = DataDirectory.open(self.path)
        identity = self.directory.identity()
        assert identity is not None
        try:
            self.store = DurableStore.open(self.directory, identity, boot_id=self.boot_id)
        except Died:
            self.directory.close()
            raise

    def be_killed(self) -> None:
        with dying(int(self.rng.integers(6)), self.rng.random()), suppress(Died):
            (self.forget if self.rng.random() < 0.2 else self.write)()
        self.let_go()
        self.open()
        del self.history[self.store.ring.total :]
        if self.store.ring.total > len(self.history):  # the whole chunk counts, or the parts that were done
            agents = SCHEMA.agent_ids(self.store.ring.ordered())[len(self.history) - self.store.ring.total :]
            self.history += enumerate(agents.tolist(), len(self.history))
        self.check_rows(self.history, min(len(self.history) - self.lost, CAPACITY))

    def lose_power(self) -> None:
        if self.rng.random() < 0.5:
            with dying(int(self.rng.integers(6)), self.rng.random()), suppress(Died):
                (self.forget if self.rng.random() < 0.2 else self.write)()
        self.let_go()
        self.start_without_power()
        del self.history[self.store.ring.total :]
        self.lost = len(self.history) - len(self.store.ring)
        self.sure, self.maybe = self.moment(), []

    def be_refused(self) -> None:
        """The disk refuses one sync; the replay may go on for a while, ends, and starts again."""
        self.disk.refuses = {("rows", "commits")[self.rng.integers(2)]}
        while self.disk.refuses:
            with suppress(DataDirectoryError):
                (self.write, self.sync_once, self.sync_once, self.forget)[self.rng.integers(4)]()
        sure, maybe = self.sure, [*self.maybe]  # nothing that comes from here on is claimed
        for _ in range(int(self.rng.integers(6))):
            with suppress(DataDirectoryError):
                (self.write, self.sync_once, self.forget)[self.rng.integers(3)]()
        with suppress(DataDirectoryError):
            (self.store.close, self.store.abandon)[self.rng.integers(2)]()
        self.directory.close()
        self.syncing = self.blocking = None
        self.sure, self.maybe = sure, maybe
        if self.rng.random() < 0.5:
            self.open()
            self.check()
        else:
            self.start_without_power()
        del self.history[self.store.ring.total :]
        self.lost = len(self.history) - len(self.store.ring)
        self.sure, self.maybe = self.moment(), []

    def start_without_power(self, *, kills: int = 2) -> None:
        """Starts on what the disk may have kept, killed a few times while it looks."""
        before = self.path
        self.boot += 1
        self.disk.after_power_loss(before, self.path, self.rng)
        self.disk.restart(self.path)
        for _ in range(kills):
            with dying(int(self.rng.integers(8)), self.rng.random()), suppress(Died):
                self.open()
                self.let_go()
        self.open()
        self.check()

    def check(self) -> None:
        """The newest of what was, or was being, synced; and of that the latest transitions, whole."""
        now = self.moment()
        assert now in {self.sure, *self.maybe}
        self.check_rows(self.history[: now.total], len(self.store.ring))

    def check_rows(self, history: list[tuple[int, int]], count: int) -> None:
        """The latest `count` transitions are there, and counted."""
        rows, expected = self.store.ring.ordered(), history[len(history) - count :]
        assert serials_of(rows) == [serial for serial, _ in expected]
        assert SCHEMA.agent_ids(rows).tolist() == [agent for _, agent in expected]
        present, inserted = (Counter(agent for _, agent in some) for some in (expected, history))
        assert self.store.ring.size_by_agent == dict(present)
        assert self.store.traffic.inserted == inserted
        assert self.store.ring.evicted_by_agent == dict(inserted - present)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [1, 3, 10, 100])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_reached_the_disk_what_is_found_was_synced_and_is_whole(tmp_path, seed, spare):
    rng = np.random.default_rng((seed, spare))
    with watched_disk() as disk:
        machine = Machine(tmp_path, disk, rng, spare=spare)
        for _ in range(4):
            odds = rng.dirichlet((4, 2, 0.3, 0.3))
            for _ in range(int(rng.integers(40))):
                (machine.write, machine.sync_once, machine.be_killed, machine.forget)[rng.choice(4, p=odds)]()
            machine.lose_power()
        machine.let_go()


@pytest.mark.slow
@pytest.mark.parametrize("spare", [1, 3, 10, 100])
@pytest.mark.parametrize("seed", range(20))
def test_after_a_sync_that_the_disk_refused_what_is_found_was_synced_before(tmp_path, seed, spare):
    """Linux says so once, and the next sync of the same pages succeeds without writing them."""
    rng = np.random.default_rng((seed, spare))
    with watched_disk(rng) as disk:
        machine = Machine(tmp_path, disk, rng, spare=spare)
        for _ in range(6):
            for end in (machine.be_refused, machine.lose_power):
                for _ in range(int(rng.integers(10))):
                    (machine.write, machine.sync_once, machine.forget)[rng.choice(3, p=(0.6, 0.3, 0.1))]()
                end()
        machine.let_go()


def busy_night(machine: Machine, *, killed: bool) -> None:
    """Syncs that end, one during which more comes than the last one foresaw, and new writers in between."""
    machine.write(0)
    while not machine.sure.total:
        machine.sync_once()
    machine.write(1)
    machine.sync_once()
    machine.write(2)
    machine.sync_once()  # the rows are on the disk
    machine.write(0)
    machine.write(1)
    machine.sync_once()  # the record that says so may be
    if killed:
        machine.let_go()
        machine.open()
    for agent in (2, 0, 1, 2):
        machine.write(agent)
    for _ in range(7):
        machine.sync_once()
    machine.forget(1)
    machine.write(1)
    for _ in range(3):
        machine.sync_once()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("spare", [1, 4])
@pytest.mark.parametrize("at_put", range(0, 160, 4))
def test_at_every_step_of_a_busy_night_every_disk_can_be_read(tmp_path, at_put, spare, killed):
    for outcome in range(4):
        rng = np.random.default_rng((at_put, spare, outcome))
        with watched_disk() as disk:
            machine = Machine(tmp_path / str(outcome), disk, rng, spare=spare)
            with dying(at_put + outcome, rng.random()) as state, suppress(Died):
                busy_night(machine, killed=killed)
            machine.let_go()
            machine.start_without_power(kills=0)
            machine.let_go()
        if state.puts <= at_put:  # it did not come to that
            return
    assert at_put < 156
