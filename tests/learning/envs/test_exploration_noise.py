"""Noise of exploration: what it is given, that it is gone on with, and what is refused of it."""

import numpy as np
import plain_policies
import pytest
import worlds
from contracts.sentences import refuses

from dase_grpc.errors import AlgorithmError
from dase_grpc.learning.envs.explorer import Explorer
from dase_grpc.learning.envs.make import schema_of
from dase_grpc.learning.envs.noise import Noise

STILL = plain_policies.ConstantPolicy(0.0)


class Noting(Noise):
    """Notes what it is given, and counts its calls, which is what it adds in hundredths."""

    def __init__(self):
        self.given, self.calls = [], np.zeros((), np.int64)

    def __call__(self, action, *, version, length, rng):
        self.given.append((version, length, rng.random()))
        self.calls += 1
        return action + self.calls / 100

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"].copy()


def explorer(noise, *, start_steps=0) -> Explorer:
    env = worlds.PointGoal()
    return Explorer(
        env,
        schema_of(env, "worlds:PointGoal"),
        agent_id=0,
        rng=np.random.default_rng(1),
        episode_seed=lambda episode: episode,
        start_steps=start_steps,
        noise=noise,
    )


def test_it_is_given_the_version_the_episodes_steps_and_the_explorers_generator():
    noise = Noting()
    exploring = explorer(noise, start_steps=2)
    ends = [exploring.step(STILL, version).episode is not None for version in range(30)]
    lengths = [0]
    for end in ends:
        lengths.append(0 if end else lengths[-1] + 1)
    assert [length for _, length, _ in noise.given] == lengths[2:-1]
    assert [version for version, *_ in noise.given] == list(range(2, 30))
    assert len({drawn for *_, drawn in noise.given}) == 28


def test_exploring_goes_on_with_what_it_remembers():
    straight = explorer(Noting())
    for _ in range(7):
        straight.step(STILL, 0)
    numbers, arrays = straight.state()
    resumed = explorer(Noting())
    resumed.resume(numbers, {name: each.copy() for name, each in arrays.items()})
    assert resumed.replay()
    for _ in range(7):
        ours, theirs = (each.step(STILL, 0).rows[0] for each in (straight, resumed))
        assert ours.tobytes() == theirs.tobytes()


def test_a_noise_that_lacks_what_it_remembers_is_not_gone_on_with():
    exploring = explorer(Noting())
    exploring.step(STILL, 0)
    numbers, arrays = exploring.state()
    del arrays["noise.calls"]
    with pytest.raises(KeyError):
        explorer(Noting()).resume(numbers, arrays)


def gives(what) -> Noise:
    class Given(Noise):
        def __call__(self, action, **given):
            return what

    return Given()


@pytest.mark.parametrize("what", [None, 0.5, np.zeros(9), np.array(["left"])])
def test_what_is_no_action_is_refused(what):
    with refuses(AlgorithmError, "an exploration noise has to give"):
        explorer(gives(what)).step(STILL, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_and_never_stored(bad):
    size = explorer(Noting())._schema.action_size
    with refuses(AlgorithmError, "an exploration noise gave an action that is not finite"):
        explorer(gives(np.full(size, bad))).step(STILL, 0)


def test_what_lies_beyond_the_bounds_is_clipped():
    exploring = explorer(gives(np.full(explorer(Noting())._schema.action_size, 7.0)))
    row = exploring.step(STILL, 0).rows[0]
    assert set(row[exploring._schema.columns["action"]]) == {1.0}
