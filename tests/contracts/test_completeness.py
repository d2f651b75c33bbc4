"""Tables that must not miss an entry, and names that outside users rely on."""

import inspect

import grpc
import pytest

from dase_grpc import errors
from dase_grpc.errors import RefusalError
from dase_grpc.learning.similarity import measure
from dase_grpc.replay.buffer.ring import RingBuffer
from dase_grpc.replay.wire.status import STATUS
from dase_grpc.schema import TransitionSchema


def below(cls: type[RefusalError]) -> set[type[RefusalError]]:
    """All subclasses of a class, however deep."""
    return {deeper for sub in cls.__subclasses__() for deeper in ({sub} | below(sub))}


def test_every_refusal_has_a_status_and_every_status_a_refusal():
    assert set(STATUS) == below(RefusalError)


def test_no_refusal_means_success_or_an_unknown_failure():
    unclear = {grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
    assert not set(STATUS.values()) & unclear


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.MalformedError, "INVALID_ARGUMENT"),
        (errors.SchemaMismatchError, "FAILED_PRECONDITION"),
        (errors.RunMismatchError, "FAILED_PRECONDITION"),
        (errors.AgentTakenError, "ALREADY_EXISTS"),
        (errors.StaleLeaseError, "ABORTED"),
        (errors.DrainingError, "UNAVAILABLE"),
    ],
)
def test_statuses_are_those_of_the_design(error, status):
    assert STATUS[error].name == status


def test_the_names_that_examples_and_outside_checks_use_are_there():
    assert TransitionSchema.__module__ == "dase_grpc.schema"
    assert RingBuffer
    weights = inspect.signature(measure.similarity_weights).parameters
    required = ["actions", "policy_actions", "agent_ids", "own_id"]
    settings = ["reference_variance", "divergence", "scope", "floor", "shrinkage", "debias", "normalise"]
    assert list(weights) == required + settings
    defaults = {name: weights[name].default for name in ("reference_variance", "divergence", "scope")}
    assert defaults == {"reference_variance": 0.1, "divergence": "jeffreys", "scope": "pooled"}
    assert all(weights[name].kind is inspect.Parameter.KEYWORD_ONLY for name in defaults)
    asked = list(inspect.signature(measure.divergence).parameters)
    assert asked == ["mean", "cov", "reference_variance", "kind"]
