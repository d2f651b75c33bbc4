"""Observations, actions and descriptions as messages: what goes over as it is, and what is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
from contracts.sentences import refuses
from inference.policies import ABOUT, rows

from dase_grpc.errors import DaseError, EnvironmentSpecError, MalformedError
from dase_grpc.inference.v1.inference_pb2 import ActRequest, ActResponse, DescribePolicyResponse
from dase_grpc.inference.wire import (
    ROWS_BYTES,
    PolicyDescription,
    read_actions,
    read_observations,
    rows_in_a_message,
    to_rows,
    write_actions,
    write_observations,
)
from dase_grpc.replay.wire.addresses import MAX_MESSAGE_BYTES


@pytest.mark.parametrize("policy", [ABOUT, replace(ABOUT, score=None, commit="", action_shape=(2, 3))])
def test_a_description_crosses_the_wire_as_it_is(policy):
    data = policy.to_proto().SerializeToString()
    assert PolicyDescription.from_proto(DescribePolicyResponse.FromString(data)) == policy
    assert DescribePolicyResponse.FromString(data).max_rows == policy.max_rows


def test_observations_cross_the_wire_as_float32_in_c_order():
    pictures = replace(ABOUT, observation_shape=(2, 2))
    given = np.arange(12.0).reshape(3, 2, 2)
    rows, single = to_rows(given, pictures)
    found = read_observations(write_observations(rows), pictures)
    assert not single
    assert found.dtype == np.float32
    assert (found == given.reshape(3, 4)).all()


@pytest.mark.parametrize(
    ("given", "count", "single"), [([[1, 2]], 1, False), ([1, 2], 1, True), (np.ones((3, 2)), 3, False)]
)
def test_one_observation_is_told_from_a_batch_by_its_shape(given, count, single):
    rows, found = to_rows(given, replace(ABOUT, observation_shape=(2,)))
    assert (rows.shape, rows.dtype, found) == ((count, 2), np.float32, single)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8"])
def test_actions_cross_the_wire_in_their_shape_and_dtype_and_may_be_written_to(dtype):
    policy = replace(ABOUT, action_shape=(2, 3), action_dtype=np.dtype(dtype))
    actions = np.arange(12).reshape(2, 2, 3).astype(dtype)
    found = read_actions(write_actions(actions), 2, policy)
    assert found.dtype == actions.dtype
    assert (found == actions).all()
    found += 1


def test_the_most_rows_fit_into_a_message_both_ways():
    for observation, action in (((3,), (2,)), ((3,), (100,)), ((300, 300), (2,))):
        most = rows_in_a_message(math.prod(observation), np.zeros(action))
        policy = replace(ABOUT, observation_shape=observation, action_shape=action, max_rows=most)
        request = write_observations(to_rows(np.zeros((most, *observation)), policy)[0])
        actions = np.zeros((most, *action))
        sizes = request.ByteSize(), write_actions(actions).ByteSize()
        assert ROWS_BYTES - 400_000 < max(sizes) <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (ActRequest(), "holds 1 to 1000 observations (rows), not 0"),
        (ActRequest(rows=1_001), "not 1001"),
        (
            ActRequest(rows=2, observations=bytes(12)),
            "2 observations of 3 float32 components are 24 bytes, not 12",
        ),
        (ActRequest(rows=1, observations=bytes(24)), "not 24; as float64 they would be twice as long"),
        (
            ActRequest(rows=2, observations=np.float32([[1, 2, 3], [4, np.nan, 6]]).tobytes()),
            "component 1 of observation 1 is nan; every component has to be finite",
        ),
        (
            ActRequest(rows=1, observations=np.float32([1, 2, -np.inf]).tobytes()),
            "component 2 of observation 0 is -inf",
        ),
    ],
)
def test_what_are_no_observations_of_the_policy_is_refused_with_the_number_that_is_wrong(request_, said):
    with refuses(MalformedError, said):
        read_observations(request_, ABOUT)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (rows(1)[:, :2], "observations of shape (1, 2) were given; of worlds:Small each has the shape (3,)"),
        ([], "observations of shape (0,) were given"),
        ([[1, 2, 3], [1]], "what was given is no array of numbers; of worlds:Small each"),
        ([{"position": 1}], "what was given is no array of numbers"),
        (np.zeros(3, complex), "what was given is no array of numbers"),
        (np.zeros(3, "S1"), "what was given is no array of numbers"),
        (np.zeros((1_001, 3)), "up to 1000 go at once"),
    ],
)
def test_what_a_client_cannot_send_is_refused_before_it_is_sent(given, said):
    with refuses(EnvironmentSpecError, said):
        to_rows(given, ABOUT)


def test_actions_of_another_policy_are_refused():
    with refuses(DaseError, "32 bytes of actions came for 1 observation;", "make a new client"):
        read_actions(ActResponse(actions=bytes(32)), 1, ABOUT)
