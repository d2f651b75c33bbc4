"""What an environment may return in another form than Gymnasium's interface says."""

from collections import OrderedDict
from typing import Any

import breaches
import numpy as np
import pytest
import torch

from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.learning.envs.answers import begun, taken, to_flag, to_float32, to_reward
from dase_grpc.learning.envs.flat import FlatObservation


class ArrayOfAnotherLibrary:
    """Becomes an array of NumPy's when it is asked to, as arrays of JAX do."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array([0.5, 2.0], dtype)


@pytest.mark.parametrize("one", [True, 1, 1.0, np.True_, np.int8(1), np.array([True]), torch.tensor(1), [1]])
def test_a_flag_that_can_only_be_meant_as_true_is(one: Any) -> None:
    assert to_flag(one, "terminated") is True


@pytest.mark.parametrize("zero", [False, 0, 0.0, np.False_, np.array(0), np.zeros((1, 1)), torch.zeros(1)])
def test_a_flag_that_can_only_be_meant_as_false_is(zero: Any) -> None:
    assert to_flag(zero, "terminated") is False


@pytest.mark.parametrize("other", [None, np.nan, 2, -1, "", "False", [], {}, np.zeros(2), np.array("0"), 1j])
def test_any_other_flag_is_refused(other: Any) -> None:
    with pytest.raises(
        EnvironmentSpecError, match=r"returned truncated = .*, which is neither true nor false"
    ):
        to_flag(other, "truncated")


@pytest.mark.parametrize(
    "given", [2, 2.0, np.float32(2), np.array([2]), torch.tensor([2.0], requires_grad=True), [2.0]]
)
def test_one_number_in_any_form_is_a_reward(given: Any) -> None:
    assert to_reward(given) == 2.0
    assert type(to_reward(given)) is float


@pytest.mark.parametrize("given", [None, "2", b"2", 2j, np.zeros(2), {}, 10**400])
def test_any_other_reward_is_refused(given: Any) -> None:
    with pytest.raises(EnvironmentSpecError, match="which is not one number"):
        to_reward(given)


@pytest.mark.parametrize(
    "given",
    [
        [0.5, 2],
        (0.5, 2),
        torch.tensor([0.5, 2.0], requires_grad=True),
        torch.tensor([0.5, 2.0], dtype=torch.float64),
        ArrayOfAnotherLibrary(),
        np.array([0.5, 2], object),
    ],
)
def test_numbers_in_any_form_are_an_observation(given: Any) -> None:
    converted = to_float32(given, 2)
    assert converted.dtype == np.float32
    assert converted.tolist() == [0.5, 2.0]


def test_a_step_and_a_reset_of_gymnasiums_interface_are_taken_apart() -> None:
    observation, *rest = taken((np.array([0.5, 2]), np.float32(0.5), 0, np.True_, {}), 2)
    assert observation.tolist() == [0.5, 2.0]
    assert rest == [0.5, False, True]
    assert begun((np.array([0.5, 2]), OrderedDict()), 2).tolist() == [0.5, 2.0]


@pytest.mark.parametrize("how", breaches.STEPS)
def test_the_first_fault_of_a_step_is_what_it_is_refused_for(how: str) -> None:
    returned, said = breaches.STEPS[how]
    with pytest.raises(EnvironmentSpecError) as caught:
        taken(returned, 2)
    assert said in str(caught.value)


def test_components_in_any_form_are_flattened() -> None:
    env = FlatObservation(breaches.Observes("a key is missing"))
    plain = env.observation(breaches.GOOD)
    for other in (
        {**breaches.GOOD, "one": np.int64(1)},
        {**breaches.GOOD, "one": np.array([1])},
        {**breaches.GOOD, "one": True},
        {**breaches.GOOD, "at": torch.ones((2, 3), requires_grad=True)},
        {**breaches.GOOD, "at": [[1, 1, 1], [1, 1, 1]]},
        {**breaches.GOOD, "more": OrderedDict(on=np.ones(2))},
    ):
        assert env.observation(other).tolist() == plain.tolist()
