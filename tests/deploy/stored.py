"""What the buffer of a run must hold whose environments number their steps, when all its nodes have ended."""

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dase_grpc.launch.drill.evidence import UNIT, Stored, read_buffer, read_ledger, read_marks
from dase_grpc.learning.envs.make import make_env

NONE: Mapping[int, int] = MappingProxyType({})


def wrong(
    data: Path,
    ledger: Path,
    *,
    agents: int,
    environments: int,
    resumed: Collection[int] = (),
    lossy: Collection[int] = (),
    acknowledged: Mapping[int, int] = NONE,
) -> list[str]:
    """What is wrong with the buffer; nothing if all is right.

    Each of the `environments` that explored, which are Pendulums, has all its steps there once, whole and in
    order. The `resumed`, by their numbers in the ledger, may have played a broken episode first, which is not
    stored; the `lossy`, whose nodes were killed or dropped the last, have what was `acknowledged` at least.
    """
    stored, found = read_buffer(data, agents=agents), []
    numbers, taken = _numbers(stored), {entry.number: entry for entry in read_ledger(ledger)}
    if len(stored.rows) != stored.total:
        found.append(f"{stored.total} transitions were stored, and {len(stored.rows)} are there")
    if len(np.unique(numbers)) != environments:
        found.append(f"there are transitions of {len(np.unique(numbers))} environments, not {environments}")
    env = make_env("Pendulum-v1", {})
    for number in sorted({*numbers.tolist(), *acknowledged}):
        marks = read_marks(stored.rows[numbers == number], stored.schema, env)
        begun = {0, taken[number].before_second_reset if number in resumed else 0}
        before = int(marks.step[0]) - 1 if len(marks.step) else 0
        last = before + len(marks.step)
        if not marks.whole.all() or not np.array_equal(marks.step, np.arange(before + 1, last + 1)):
            found.append(f"environment {number}: not all of its steps are there once, whole and in order")
        if before not in begun:
            found.append(f"environment {number}: its steps up to {before} are lost")
        if number not in lossy and last != taken[number].steps:
            found.append(f"environment {number} took {taken[number].steps} steps, and {last} are there")
        if last - before < acknowledged.get(number, 0):
            were = acknowledged[number]
            found.append(f"environment {number}: {were} steps were acknowledged, {last - before} are there")
    env.close()
    return found


def _numbers(stored: Stored) -> np.ndarray:
    """The environment that each row was collected in, (N,): the third column from the end of its outcome."""
    column = 2 * stored.schema.observation_size + stored.schema.action_size - 3
    return np.rint(stored.rows[:, column] / UNIT).astype(int)
