"""A model of a ReplayStore, under writers that resend, overlap, skip, mislabel and overflow."""

from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_cases import SCHEMA, rows_of, serials_of

from dase_grpc.errors import MalformedError, SequenceGapError, TooManyWritersError, WriterForgottenError
from dase_grpc.replay.buffer.ring import RingBuffer
from dase_grpc.replay.buffer.sampling import Source
from dase_grpc.replay.buffer.store import ReplayStore

CAPACITY = 7
WRITERS = ("learner-0", "actor-0", "learner-1")
AGENT = {"learner-0": 0, "actor-0": 0, "learner-1": 1}

writers = st.sampled_from(WRITERS)


class Writers(RuleBasedStateMachine):
    """Each writer keeps a log of rows it made; sending any part of it again must change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.store = self.make_store()
        self.logs: dict[str, list[tuple[int, bool]]] = {writer: [] for writer in WRITERS}
        self.committed = dict.fromkeys(WRITERS, 0)
        self.present: deque[tuple[int, int]] = deque(maxlen=CAPACITY)
        self.inserted: Counter[int] = Counter()
        self.refused: Counter[tuple[int, str]] = Counter()
        self.drawn: Counter[int] = Counter()
        self.known: set[str] = set()
        self.forgotten = 0
        self.rng = np.random.default_rng(0)

    def make_store(self) -> ReplayStore:
        return ReplayStore(RingBuffer(SCHEMA, CAPACITY), max_writers=len(WRITERS))

    @rule(writer=writers, finite=st.lists(st.booleans() | st.just(True), min_size=1, max_size=10))
    def explore(self, writer: str, finite: list[bool]) -> None:
        start = 1_000 * WRITERS.index(writer) + len(self.logs[writer])
        self.logs[writer] += [(start + offset, ok) for offset, ok in enumerate(finite)]

    @rule(writer=writers, data=st.data())
    def send(self, writer: str, data: st.DataObject) -> None:
        """Any part of the log that leaves no gap, from a full resend to only what is new."""
        log, committed = self.logs[writer], self.committed[writer]
        first = data.draw(st.integers(1, committed + 1), label="first_seq")
        last = data.draw(st.integers(first - 1, len(log)), label="last_seq")
        refused = self.store.append(
            writer, first, self._rows(writer, log[first - 1 : last]), agent_id=AGENT[writer]
        )

        assert refused == sum(not ok for _, ok in log[committed:last])
        self.note(writer, max(committed, last))

    def note(self, writer: str, last: int) -> None:
        """Notes that a writer's log is committed up to and with number `last`."""
        fresh = self.logs[writer][self.committed[writer] : last]
        kept = [(serial, AGENT[writer]) for serial, ok in fresh if ok]
        if fresh:  # who sends nothing takes no place in the table
            self.known.add(writer)
        self.committed[writer] = last
        self.present.extend(kept)
        self.inserted[AGENT[writer]] += len(kept)
        self.refused[AGENT[writer], "not_finite"] += len(fresh) - len(kept)

    @rule(writer=writers, skipped=st.integers(1, 5))
    def skip(self, writer: str, skipped: int) -> None:
        first = self.committed[writer] + 1 + skipped
        with pytest.raises(SequenceGapError, match=f"resend from {self.committed[writer] + 1}$"):
            self.store.append(writer, first, rows_of([9_999], AGENT[writer]), agent_id=AGENT[writer])

    @rule(writer=writers, before=st.integers(0, 3))
    def mislabel(self, writer: str, before: int) -> None:
        right, wrong = AGENT[writer], AGENT[writer] + 1
        rows = rows_of(range(9_000, 9_001 + before), [right] * before + [wrong])
        with pytest.raises(MalformedError):
            self.store.append(writer, self.committed[writer] + 1, rows, agent_id=right)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """What it stored stays; whoever has that name from now on begins at 1."""
        writer = data.draw(st.sampled_from(sorted(self.known)), label="writer")
        self.store.forget([(AGENT[writer], writer)])
        self.note_forgotten(writer)

    def note_forgotten(self, writer: str) -> None:
        self.forgotten += 1
        self.known.remove(writer)
        self.logs[writer], self.committed[writer] = [], 0

    @rule(writer=writers, behind=st.integers(1, 2))
    def come_back(self, writer: str, behind: int) -> None:
        """A writer that has heard of fewer forgotten ones is refused, unless it is known."""
        store, agent = self.store, AGENT[writer]
        store.require_remembered(writer, agent_id=agent, forgotten=self.forgotten)
        if writer in self.known:
            store.require_remembered(writer, agent_id=agent, forgotten=self.forgotten - behind)
            return
        with pytest.raises(WriterForgottenError):
            store.require_remembered(writer, agent_id=agent, forgotten=self.forgotten - behind)

    @precondition(lambda self: len(self.known) == len(WRITERS))
    @rule()
    def overflow(self) -> None:
        with pytest.raises(TooManyWritersError):
            self.store.append("one-too-many", 1, rows_of([9_999], 0), agent_id=0)

    @precondition(lambda self: self.present)
    @rule(agent=st.integers(0, 1), count=st.integers(1, 20))
    def sample(self, agent: int, count: int) -> None:
        drawn = serials_of(Source(self.store, agent).draw(count, self.rng)[0])
        assert len(drawn) == count
        assert set(drawn) <= {serial for serial, _ in self.present}
        self.drawn[agent] += count

    @invariant()
    def each_transition_is_stored_exactly_once_and_in_order(self) -> None:
        assert serials_of(self.store.ring.ordered()) == [serial for serial, _ in self.present]
        assert {
            writer: self.store.committed(writer, agent_id=AGENT[writer]) for writer in WRITERS
        } == self.committed

    @invariant()
    def the_counters_are_right(self) -> None:
        traffic, present = self.store.traffic, Counter(agent for _, agent in self.present)
        assert traffic.inserted == self.inserted
        assert traffic.refused == self.refused
        assert (traffic.inserted_total, traffic.refused_total) == (
            self.inserted.total(),
            self.refused.total(),
        )
        assert traffic.sampled_total == traffic.sampled.total() == self.drawn.total()
        assert self.store.ring.evicted_by_agent == dict(self.inserted - present)
        assert self.store.ring.size_by_agent == dict(present)
        for agent in (0, 1):
            drawn = sum(n for (by, _), n in traffic.sampled.items() if by == agent)
            assert drawn == self.drawn[agent]

    def _rows(self, writer: str, log: list[tuple[int, bool]]) -> np.ndarray:
        rows = rows_of([serial for serial, _ in log], AGENT[writer])
        for row, (_, finite) in zip(rows, log, strict=True):
            if not finite:
                row[0] = np.nan
        return rows
