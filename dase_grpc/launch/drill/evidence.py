"""The evidence of a drill: each acknowledged transition lies in the buffer once, whole, in order.

`dase drill` trains in an environment that numbers its steps in what it observes, so that a buffer can be
checked row by row: no other mark survives the way through learner, network and disk.
"""

import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from dase_grpc.errors import DataDirectoryError
from dase_grpc.learning.envs.answers import ActionMap, parts, to_float32, to_reward
from dase_grpc.learning.envs.make import Environment, make_env, schema_of
from dase_grpc.process.ends import boot_id
from dase_grpc.progress import several
from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import DurableStore
from dase_grpc.schema import Array, TransitionSchema

MARKS: Final = 3
"""Columns behind the observation: the environment's number, the step's, and a check sum."""

UNIT: Final = np.float32(2**-24)
"""What a mark is a multiple of: float32 holds all 2^24 of them exactly, and networks see small numbers."""

_ENTRY: Final = struct.Struct("<qqq")


@dataclass(frozen=True)
class Tally:
    """How many finite steps an environment has taken; kept in a file that outlives a killed process.

    `number` is its own among all that wrote to the same folder. A learner that resumes plays the broken
    episode again first, `before_second_reset`, and stores nothing of that.
    """

    number: int
    pid: int
    steps: int
    before_second_reset: int


def read_ledger(folder: Path) -> list[Tally]:
    """How far each environment has come, in the order in which they were made."""
    found = ((int(path.name), _ENTRY.unpack(path.read_bytes())) for path in folder.iterdir())
    return [Tally(number, *entry) for number, entry in sorted(found)]


class Numbered(gymnasium.Wrapper[Array, Array, Array, Array]):
    """Observes three marks more: its own number, the number of finite steps so far, and a check sum.

    The sum is over all that came with the observation: the marks, the action and the reward. `ledger` is the
    folder that counts its steps. `pause_s` is slept in each, so that a tiny environment does not take all
    the time of the machine.
    """

    def __init__(
        self,
        *,
        env_id: str,
        kwargs: Mapping[str, Any],
        ledger: str,
        pause_s: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        env = make_env(env_id, kwargs, render_mode=render_mode)
        super().__init__(env)
        self._size = schema_of(env, "numbered").observation_size
        space = env.observation_space
        if not isinstance(space, Box):
            raise TypeError(f"{space} is not a flat Box, which make_env promises")
        low, high = (
            np.append(to_float32(bound, self._size), np.full(MARKS, fill, np.float32))
            for bound, fill in ((space.low, 0), (space.high, 1))
        )
        self.observation_space = Box(low, high, dtype=np.float32)
        self._ledger = Path(ledger)
        self._pause_s = pause_s
        self._number, self._steps, self._resets, self._finite = -1, 0, 0, False
        self._entry: mmap.mmap | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begins an episode; the count goes on."""
        received, info = parts(self.env.reset(seed=seed, options=options), "reset")
        if self._entry is None:
            self._number, self._entry = _new_entry(self._ledger)
        if self._resets == 1:
            _ENTRY.pack_into(self._entry, 0, os.getpid(), self._steps, self._steps)
        self._resets += 1
        observation = to_float32(received, self._size)
        self._finite = bool(np.isfinite(observation).all())
        return self._marked(observation, b"", np.float32(0)), info

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """A step; counted where it makes a transition that is finite, for no other one is stored."""
        acted = np.asarray(action).tobytes()
        received, given, terminated, truncated, info = parts(self.env.step(action), "step")
        if self._pause_s:
            time.sleep(self._pause_s)
        observation, reward = to_float32(received, self._size), to_reward(given)
        was_finite, self._finite = self._finite, bool(np.isfinite(observation).all())
        with np.errstate(over="ignore"):
            stored = np.float32(reward)
        if not (was_finite and self._finite and np.isfinite(stored)) or self._entry is None:
            return self._marked(observation, b"", np.float32(0)), reward, terminated, truncated, info
        self._steps += 1
        self._entry[8:16] = self._steps.to_bytes(8, "little")
        return self._marked(observation, acted, stored), reward, terminated, truncated, info

    def _marked(self, observation: Array, acted: bytes, reward: np.float32) -> Array:
        marks = np.array([self._number, self._steps, 0], np.float32) * UNIT
        marked = np.append(observation, marks)
        marked[-1] = np.float32(_check_sum(marked[:-1], acted, reward)) * UNIT
        return marked


def _new_entry(folder: Path) -> tuple[int, mmap.mmap]:
    """Takes the next free number; its file counts the steps and is this process's to write."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        try:
            descriptor = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            continue
        os.write(descriptor, _ENTRY.pack(os.getpid(), 0, 0))
        entry = mmap.mmap(descriptor, _ENTRY.size)
        os.close(descriptor)
        return number, entry
    raise AssertionError("numbers have no end")


def _check_sum(marked: Array, acted: bytes, reward: np.float32) -> int:
    return zlib.crc32(acted, zlib.crc32(reward.tobytes(), zlib.crc32(marked.tobytes()))) >> 8


@dataclass(frozen=True)
class Marks:
    """What the marks of N stored transitions say, (N,) each: environments, their finite steps from 1 on.

    A transition is `whole` where the check sums fit all columns but the last three of the row.
    """

    number: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    whole: npt.NDArray[np.bool_]


def read_marks(rows: Array, schema: TransitionSchema, env: Environment) -> Marks:
    """Reads the marks of (N, width) transitions of one agent, in the order in which they were stored.

    A transition is whole if what it came to has the right sum, over its action and reward too, and if it
    began where the one before ended, or else with what came of a reset or of a step that could not be stored;
    the first one may begin anywhere.
    """
    to_env = ActionMap(env.action_space)
    m, n = schema.observation_size, schema.action_size
    before, actions = rows[:, :m], rows[:, m : m + n]
    after, rewards = rows[:, m + n : 2 * m + n], rows[:, 2 * m + n]
    whole = np.ones(len(rows), np.bool_)
    for index in range(len(rows)):
        acted = to_env(actions[index]).tobytes()
        fits = _fits(after[index], acted, rewards[index])
        follows = index == 0 or before[index].tobytes() == after[index - 1].tobytes()
        whole[index] = fits and (follows or _fits(before[index], b"", np.float32(0)))
    numbers, steps = (np.rint(after[:, column] / UNIT).astype(np.int64) for column in (-3, -2))
    began = np.rint(before[:, [-3, -2]] / UNIT).astype(np.int64)
    whole &= (began[:, 0] == numbers) & (began[:, 1] == steps - 1)
    return Marks(numbers, steps, whole)


def _fits(observed: Array, acted: bytes, reward: np.float32) -> bool:
    return bool(np.float32(_check_sum(observed[:-1], acted, reward)) * UNIT == observed[-1])


@dataclass(frozen=True)
class Life:
    """What is known of one learner process from outside.

    It was last seen to know of `acknowledged` transitions as committed. If it `ended_well`, with exit code 0,
    all it had taken had to be.
    """

    agent_id: int
    pid: int
    acknowledged: int
    ended_well: bool


@dataclass(frozen=True)
class Stored:
    """A buffer's transitions, the oldest first; how many there were ever, and the last of each learner."""

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
            committed = {each: store.committed(f"learner-{each}", agent_id=each) for each in range(agents)}
            ring = store.ring
            return Stored(identity.schema, ring.ordered(), ring.total, identity.capacity, committed)
        finally:
            store.abandon()
    finally:
        directory.close()


def problems(stored: Stored, lives: Sequence[Life], ledger: Sequence[Tally], env: Environment) -> list[str]:
    """All that is wrong with a buffer of numbered transitions, a sentence each; none if all is right.

    lives are in the order in which each agent's learners came; env maps actions as the learners' did.
    """
    total, kept = sum(stored.committed.values()), len(stored.rows)
    found = []
    if stored.total != total:
        were = several(stored.total, "transition was", "transitions were")
        found.append(f"{were} stored, but the learners committed {total}")
    if kept != (expected := min(stored.total, stored.capacity)):
        found.append(f"{several(kept, 'transition is', 'transitions are')} there, not {expected}")
    agent_ids = stored.schema.agent_ids(stored.rows)
    if strangers := set(agent_ids.tolist()) - set(stored.committed):
        found.append(f"there are transitions of agents {sorted(strangers)}, who never joined")
    for agent_id, committed in stored.committed.items():
        rows = stored.rows[agent_ids == agent_id]
        own = [life for life in lives if life.agent_id == agent_id]
        whole_history = stored.total <= stored.capacity
        if whole_history and len(rows) != committed:
            found.append(f"agent {agent_id} committed {committed} transitions, and {len(rows)} are there")
        wrong = _of_agent(rows, stored.schema, own, ledger, env, whole_history=whole_history)
        found += [f"agent {agent_id}: {text}" for text in wrong]
    return found


def _of_agent(
    rows: Array,
    schema: TransitionSchema,
    lives: Sequence[Life],
    ledger: Sequence[Tally],
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


def _of_process(life: Life, entry: Tally, first: int, last: int, *, cut: bool) -> Iterator[str]:
    """What is wrong with the steps first..last that one process stored; `cut` if older ones made room."""
    if not cut and first not in (1, entry.before_second_reset + 1):
        yield f"process {life.pid} stored its transitions from number {first} on, so earlier ones are lost"
    count = last if cut else last - first + 1
    if count < life.acknowledged:
        known, were = several(life.acknowledged, "transition"), "was" if life.acknowledged == 1 else "were"
        yield f"{known} of process {life.pid} {were} acknowledged, {count} are there"
    if last > entry.steps:
        yield f"process {life.pid} took {several(entry.steps, 'step')}, and number {last} is there"
    if life.ended_well and last != entry.steps:
        taken = several(entry.steps, "step")
        yield f"process {life.pid} ended well after {taken}, but {last} is the last that is there"
