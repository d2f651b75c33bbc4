"""The evidence of a drill: each acknowledged transition lies in the buffer once, whole, in order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from dase_grpc.errors import DataDirectoryError
from dase_grpc.launch.drill.numbered import Taken, read_marks
from dase_grpc.learning.envs.make import Environment
from dase_grpc.nodes.replay import boot_id
from dase_grpc.progress import several
from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import DurableStore
from dase_grpc.schema import Array, TransitionSchema


@dataclass(frozen=True)
class Life:
    """What is known of one learner process from outside.

    Attributes:
        agent_id: whose transitions it stored.
        pid: its own.
        acknowledged: transitions that it was last seen to know of as committed.
        ended_well: whether it ended with exit code 0, so that all it had taken had to be committed.
    """

    agent_id: int
    pid: int
    acknowledged: int
    ended_well: bool


@dataclass(frozen=True)
class Stored:
    """What the files of a buffer hold.

    Attributes:
        rows: the transitions present, the oldest first.
        total: transitions stored ever.
        committed: the last number of each agent's learner.
    """

    schema: TransitionSchema
    rows: Array
    total: int
    capacity: int
    committed: Mapping[int, int]


def read_buffer(data_dir: Path, *, agents: int) -> Stored:
    """Reads the buffer in a data directory whose replay has ended.

    Raises:
        DataDirectoryError: it is in use or damaged, or holds no buffer.
    """
    directory = DataDirectory.open(data_dir)
    try:
        identity = directory.identity()
        if identity is None:
            raise DataDirectoryError(f"{data_dir} holds no buffer; let a learner join first")
        store = DurableStore.open(directory, identity, boot_id=boot_id())
        try:
            committed = {
                agent_id: store.committed(writer_name(agent_id), agent_id=agent_id)
                for agent_id in range(agents)
            }
            return Stored(
                identity.schema, store.ring.ordered(), store.ring.total, identity.capacity, committed
            )
        finally:
            store.abandon()
    finally:
        directory.close()


def writer_name(agent_id: int) -> str:
    """The name under which a learner numbers its transitions."""
    return f"learner-{agent_id}"


def problems(stored: Stored, lives: Sequence[Life], ledger: Sequence[Taken], env: Environment) -> list[str]:
    """All that is wrong with a buffer of numbered transitions, a sentence each; none if all is right.

    lives are in the order in which each agent's learners came; env maps actions as the learners' did.
    """
    total, kept = sum(stored.committed.values()), len(stored.rows)
    found = []
    if stored.total != total:
        found.append(
            f"{several(stored.total, 'transition was', 'transitions were')} stored, but the learners "
            f"committed {total}"
        )
    if kept != min(stored.total, stored.capacity):
        found.append(
            f"{several(kept, 'transition is', 'transitions are')} there, not "
            f"{min(stored.total, stored.capacity)}"
        )
    agent_ids = stored.schema.agent_ids(stored.rows)
    if strangers := set(agent_ids.tolist()) - set(stored.committed):
        found.append(f"there are transitions of agents {sorted(strangers)}, who never joined")
    for agent_id, committed in stored.committed.items():
        rows = stored.rows[agent_ids == agent_id]
        own = [life for life in lives if life.agent_id == agent_id]
        whole_history = stored.total <= stored.capacity
        if whole_history and len(rows) != committed:
            found.append(f"agent {agent_id} committed {committed} transitions, and {len(rows)} are there")
        found += [
            f"agent {agent_id}: {text}"
            for text in _of_agent(rows, stored.schema, own, ledger, env, whole_history=whole_history)
        ]
    return found


def _of_agent(
    rows: Array,
    schema: TransitionSchema,
    lives: Sequence[Life],
    ledger: Sequence[Taken],
    env: Environment,
    *,
    whole_history: bool,
) -> Iterator[str]:
    """What is wrong with the transitions of one agent."""
    marks = read_marks(rows, schema, env)
    if torn := int((~marks.whole).sum()):
        yield f"{torn} of {len(rows)} transitions are not whole, or do not follow the one before"
    edges = [0, *(np.flatnonzero(np.diff(marks.number)) + 1).tolist(), len(rows)]
    spans = [(start, end) for start, end in pairwise(edges) if end > start]
    numbers = [int(marks.number[start]) for start, _ in spans]
    entries, known = {entry.number: entry for entry in ledger}, {life.pid: life for life in lives}
    if sorted(set(numbers)) != numbers or not set(numbers) <= set(entries):
        yield f"its learners' transitions are mixed up: they come in the order {numbers}"
        return
    for index, (number, (start, end)) in enumerate(zip(numbers, spans, strict=True)):
        entry, steps = entries[number], marks.step[start:end]
        if not (np.diff(steps) == 1).all():
            yield f"of learner process {entry.pid}, transitions are missing, doubled or out of order"
        if entry.pid not in known:
            yield f"process {entry.pid}, which was no learner of its, stored {end - start} transitions"
            continue
        cut = index == 0 and not whole_history
        yield from _of_process(known[entry.pid], entry, int(steps[0]), int(steps[-1]), cut=cut)
    if whole_history:
        stored = {entries[number].pid for number in numbers}
        for life in lives:
            if life.acknowledged and life.pid not in stored:
                yield f"nothing is there of the {life.acknowledged} acknowledged transitions of {life.pid}"


def _of_process(life: Life, entry: Taken, first: int, last: int, *, cut: bool) -> Iterator[str]:
    """What is wrong with the steps first..last that one process stored; `cut` if older ones made room."""
    if not cut and first not in (1, entry.before_second_reset + 1):
        yield f"process {life.pid} stored its transitions from number {first} on, so earlier ones are lost"
    count = last if cut else last - first + 1
    if count < life.acknowledged:
        yield (
            f"{several(life.acknowledged, 'transition')} of process {life.pid} "
            f"{'was' if life.acknowledged == 1 else 'were'} acknowledged, {count} are there"
        )
    if last > entry.steps:
        yield f"process {life.pid} took {several(entry.steps, 'step')}, and number {last} is there"
    if life.ended_well and last != entry.steps:
        yield (
            f"process {life.pid} ended well after {several(entry.steps, 'step')}, but {last} is the last "
            f"that is there"
        )
