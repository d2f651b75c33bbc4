"""An environment that numbers its steps in what it observes, so that a buffer can be checked row by row.

`dase drill` trains in it: no other mark survives the way through learner, network and disk.
"""

import mmap
import os
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from dase_grpc.learning.envs.answers import parts, to_float32, to_reward
from dase_grpc.learning.envs.make import ActionMap, Environment, make_env, schema_of
from dase_grpc.schema import Array, TransitionSchema

MARKS: Final = 3
"""Columns behind the observation: the environment's number, the step's, and a check sum."""

UNIT: Final = np.float32(2**-24)
"""What a mark is a multiple of: float32 holds all 2^24 of them exactly, and networks see small numbers."""

_ENTRY: Final = struct.Struct("<qqq")


@dataclass(frozen=True)
class Taken:
    """How far an environment has come; kept in a file that outlives a killed process.

    Attributes:
        number: the environment's own among all that wrote to the same folder.
        pid: the process it lives in.
        steps: finite steps taken, ever.
        before_second_reset: those of them before it was reset for the second time; a learner that resumes
            plays the broken episode again first, and stores nothing of that.
    """

    number: int
    pid: int
    steps: int
    before_second_reset: int


def numbered(
    *,
    env_id: str,
    kwargs: Mapping[str, Any],
    ledger: str,
    pause_s: float = 0.0,
    render_mode: str | None = None,
) -> "Numbered":
    """The factory of an environment that is numbered; `ledger` is the folder that counts its steps."""
    return Numbered(make_env(env_id, kwargs, render_mode=render_mode), Path(ledger), pause_s=pause_s)


def read_ledger(folder: Path) -> list[Taken]:
    """How far each environment has come, in the order in which they were made."""
    found = ((int(path.name), _ENTRY.unpack(path.read_bytes())) for path in folder.iterdir())
    return [Taken(number, *entry) for number, entry in sorted(found)]


class Numbered(gymnasium.Wrapper[Array, Array, Array, Array]):
    """Observes three marks more: its own number, the number of finite steps so far, and a check sum.

    The sum is over all that came with the observation: the marks, the action and the reward. `pause_s` is
    slept in each step, so that a tiny environment does not take all the time of the machine.
    """

    def __init__(self, env: Environment, ledger: Path, *, pause_s: float) -> None:
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
        self._ledger = ledger
        self._pause_s = pause_s
        self._number = -1
        self._steps = 0
        self._resets = 0
        self._finite = False
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
    """What the marks of stored transitions say, each in an array of one entry a transition.

    Attributes:
        number: of the environment.
        step: of the environment's finite steps, from 1.
        whole: whether the check sums fit all columns but the last three of the row.
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
