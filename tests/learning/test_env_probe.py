"""Trying an environment out before a run."""

import pytest
import worlds

from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.learning.env_probe import probe
from dase_grpc.learning.envs import make_env
from dase_grpc.learning.watch import Watch


def refusal(env_id: str, **kwargs: object) -> str:
    with pytest.raises(EnvironmentSpecError) as caught:
        probe(make_env(env_id, kwargs), Watch("a test"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["PointGoal", "DictObservation", "PictureObservation", "MatrixAction", "IntegerAction", "limited"]
)
def test_a_good_environment_passes(name: str) -> None:
    probe(make_env(f"worlds:{name}", {}), Watch("a test"))


def test_the_seed_reaches_the_environment_and_the_action_is_the_middle_one() -> None:
    env = worlds.EndpointAction()
    probe(env, Watch("a test"), seed=6)
    assert env.seeds == [6]
    assert [action.tolist() for action in env.actions] == [[0, 0.5, 0.5]]


def test_a_reset_without_a_seed_is_told_gymnasiums_interface() -> None:
    assert refusal("worlds:OldReset") == (
        "the environment's reset does not take seed, but in Gymnasium's interface "
        "reset(self, *, seed=None, options=None) returns (observation, info)"
    )


def test_other_tuples_than_gymnasiums_are_refused() -> None:
    assert "reset returned one ndarray, but" in refusal("worlds:OldReturns")
    assert "step returned 4 values, but" in refusal("worlds:OldReturns", old_step=True)
    assert "reset returned another number of values" in refusal("worlds:OldReturns", nested=True)
    assert "step returned another number of values" in refusal(
        "worlds:OldReturns", old_step=True, nested=True
    )


def test_another_observation_than_the_spaces_is_refused() -> None:
    assert "shape (1,), but its observation space says (2,)" in refusal("worlds:WrongShape")
    assert "no array of numbers (str)" in refusal("worlds:TextObservation")


def test_the_environments_own_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ValueError("too many values to unpack"), TypeError("no"), RuntimeError("licence")):

        def fails(
            self: object, *, seed: object = None, options: object = None, error: Exception = error
        ) -> None:
            raise error

        monkeypatch.setattr(worlds.Endless, "reset", fails)
        with pytest.raises(type(error)) as caught:
            probe(worlds.Endless(), Watch("a test"))
        assert caught.value is error
