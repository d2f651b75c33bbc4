"""NStep: every step becomes one row, with the return that its definition says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dase_grpc.learning.envs.steps import NStep
from dase_grpc.schema import Array, TransitionSchema

SCHEMA = TransitionSchema("chain", 1, 1, (-1.0,), (1.0,))

EPISODES = st.lists(
    st.tuples(
        st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=9),
        st.sampled_from(["terminated", "truncated", "cut"]),
    ),
    max_size=5,
)


def stepped(at: int, reward: float, *, bootstrap: float) -> Array:
    """The row of a step from state `at` to the next."""
    row = np.zeros(SCHEMA.width, np.float32)
    row[[0, 2]] = at, at + 1
    row[3:5] = reward, bootstrap
    row.view(np.uint32)[-2:] = 3, at
    return row


def brought(steps: NStep, rewards: list[float], ending: str, *, start: int) -> list[Array]:
    rows = []
    for number, reward in enumerate(rewards):
        last = number == len(rewards) - 1
        row = stepped(start + number, reward, bootstrap=float(not (last and ending == "terminated")))
        rows += steps.step(row, ended=last and ending != "cut")
    return rows + (steps.cut() if ending == "cut" else [])


@given(episodes=EPISODES, n=st.integers(1, 6), discount=st.sampled_from([0.0, 0.9, 1.0]))
def test_a_row_is_the_return_of_the_next_steps_of_its_episode(episodes, n, discount):
    steps, rows, expected, start = NStep(SCHEMA, n=n, discount=discount), [], [], 0
    for rewards, ending in episodes:
        rows += brought(steps, rewards, ending, start=start)
        for number in range(len(rewards)):
            part = rewards[number : number + n]
            reaches_end = number + len(part) == len(rewards)
            bootstrap = discount ** (len(part) - 1) * (not (reaches_end and ending == "terminated"))
            return_ = sum(discount**power * reward for power, reward in enumerate(part))
            expected.append((start + number, start + number + len(part), return_, bootstrap))
        start += len(rewards)
    assert len(steps) == 0
    assert [(row[0], row[2]) for row in rows] == [each[:2] for each in expected]
    assert [tuple(row[3:5]) for row in rows] == [pytest.approx(each[2:], rel=1e-6) for each in expected]
    assert [row.view(np.uint32)[-2:].tolist() for row in rows] == [[3, each[0]] for each in expected]


def test_a_single_step_passes_as_it_is():
    row = stepped(4, 0.1, bootstrap=1.0)
    assert NStep(SCHEMA, n=1, discount=0.99).step(row, ended=False)[0] is row


def test_what_goes_on_from_a_state_brings_the_same_rows():
    steps, resumed = (NStep(SCHEMA, n=3, discount=0.9) for _ in range(2))
    assert [steps.step(stepped(at, 1.5, bootstrap=1.0), ended=False) for at in (7, 8)] == [[], []]
    resumed.resume(steps.state())
    last = stepped(9, 5.0, bootstrap=0.0)
    ours, theirs = (each.step(last.copy(), ended=True) for each in (steps, resumed))
    assert np.array(ours).tobytes() == np.array(theirs).tobytes()
    assert len(NStep(SCHEMA, n=3, discount=0.9).state()) == 0
