"""An environment that raises is made anew, a bounded number of times, and exploring goes on."""

import json
import logging
from functools import partial

import breaches
import numpy as np
import plain_policies
import pytest
import worlds
from contracts.sentences import assert_one_sentence

from dase_grpc.config.sections import EnvConfig
from dase_grpc.errors import LASTING_CODES, EnvironmentFailedError, EnvironmentSpecError
from dase_grpc.learning.envs.evaluation import Evaluator
from dase_grpc.learning.envs.explorer import Explorer
from dase_grpc.learning.envs.flat import FlatObservation
from dase_grpc.learning.envs.make import schema_of
from dase_grpc.learning.envs.noise import Gaussian
from dase_grpc.learning.envs.restarts import (
    GOOD_STEPS,
    EnvironmentBroke,
    RestartableEnv,
    WatchedEnv,
    evaluation_env,
)
from dase_grpc.process.watchdog import Watch

POLICY = plain_policies.ConstantPolicy(0.25)


class Collapsed(Exception):
    """What a simulator raises."""


class Scripted(worlds.Clock):
    """A Clock whose calls, counted over all that one `Maker` makes, raise where the script says so."""

    def __init__(self, maker):
        super().__init__()
        self._maker = maker

    def reset(self, **options):
        self._maker.raise_if_due("reset")
        return super().reset(**options)

    def step(self, action):
        self._maker.raise_if_due("step")
        return super().step(action)

    def close(self):
        super().close()
        self._maker.raise_if_due("close")


class Maker:
    """Makes environments; call number k of a kind, from 1, raises what `script` has for it."""

    def __init__(self, script, always=()):
        self.script = script
        self.always = always
        self.calls = {"make": 0, "reset": 0, "step": 0, "close": 0}
        self.made = []

    def raise_if_due(self, kind):
        self.calls[kind] += 1
        error = self.script.get((kind, self.calls[kind]))
        if error is None and kind in self.always and self.calls[kind] > 1:
            error = Collapsed(f"{kind} is broken")
        if error is not None:
            raise error

    def __call__(self):
        self.raise_if_due("make")
        self.made.append(Scripted(self))
        return self.made[-1]


def explorer(maker, *, max_restarts=5, pauses=None):
    env = RestartableEnv(
        maker,
        Watch("agent 0"),
        max_restarts=max_restarts,
        pause=[].append if pauses is None else pauses.append,
    )
    schema = schema_of(env, "a world")
    exploring = Explorer(
        env,
        schema,
        agent_id=0,
        rng=np.random.default_rng(0),
        episode_seed=lambda episode: 100 + 2 * episode,
        start_steps=0,
        noise=Gaussian(0.0),
    )
    return exploring, env, schema


def explore(maker, count, **options):
    exploring, env, schema = explorer(maker, **options)
    steps = [exploring.step(POLICY, 0) for _ in range(count)]
    return steps, schema.named(np.stack([row for step in steps for row in step.rows])), env


def test_a_step_that_raises_once_is_left_out_and_a_new_episode_begins_in_a_new_environment(caplog):
    maker = Maker({("step", 4): RuntimeError("the simulator\nbroke")})
    steps, rows, _ = explore(maker, 6)
    assert rows["observation"][:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows["next_observation"][:, 0].tolist() == [1, 2, 3, 1, 2, 3]
    assert rows["bootstrap"].tolist() == [1] * 6
    assert [step.restarts for step in steps] == [(), (), (), ("step",), (), ()]
    assert [step.episode for step in steps] == [None] * 6
    first, second = maker.made
    assert (first.closed, first.seeds) == (1, [100])
    assert (second.closed, second.seeds) == (0, [102])
    assert (
        "agent 0 at step 3: the environment raised RuntimeError: the simulator broke in step" in caplog.text
    )
    assert "in raise_if_due" in caplog.text  # its traceback


def test_a_reset_that_raises_once_has_another_seed_the_next_time():
    maker = Maker({("reset", 2): ValueError("bad seed")})
    steps, rows, _ = explore(maker, 12)
    assert steps[10].restarts == ("reset",)
    assert rows["observation"][10:, 0].tolist() == [0, 1]
    assert [env.seeds for env in maker.made] == [[100], [104]]


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(0), GeneratorExit()], ids=repr)
def test_what_is_meant_for_others_is_an_exception_like_any_other(error):
    steps, _, _ = explore(Maker({("step", 2): error}), 4)
    assert [step.restarts for step in steps] == [(), ("step",), (), ()]


def test_what_the_user_interrupts_stays_interrupted():
    exploring, _, _ = explorer(Maker({("step", 1): KeyboardInterrupt()}))
    with pytest.raises(KeyboardInterrupt):
        exploring.step(POLICY, 0)


def test_an_environment_that_always_raises_ends_in_one_sentence_after_growing_pauses(caplog):
    maker, pauses = Maker({}, always={"step"}), []
    exploring, env, _ = explorer(maker, max_restarts=3, pauses=pauses)
    exploring.step(POLICY, 0)
    with pytest.raises(EnvironmentFailedError) as caught:
        exploring.step(POLICY, 0)
    assert_one_sentence(
        caught.value,
        "agent 0 at step 1: the environment raised Collapsed: step is broken in step, after 3 restarts",
        "traceback is in the log",
        "env.max_restarts",
        "(the last checkpoint, if there is one, is kept)",
    )
    assert isinstance(caught.value.__cause__, Collapsed)
    assert pauses == [0.1, 0.2, 0.4]
    assert maker.calls["make"] == 4
    final = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info[1] for record in final] == [caught.value.__cause__]
    env.close()


def test_an_environment_that_cannot_be_made_anew_is_tried_as_often():
    maker = Maker({("step", 1): RuntimeError("broke"), ("make", 2): EnvironmentSpecError("no licence")})
    steps, _, _ = explore(maker, 2)
    assert steps[0].restarts == ("step",)
    assert [env.closed for env in maker.made] == [1, 0]


@pytest.mark.parametrize(
    ("max_restarts", "said"),
    [
        (2, "raised Collapsed: make is broken in make, after 2"),
        (0, r"env\.max_restarts = 0 allows no restart"),
    ],
)
def test_no_more_restarts_than_are_allowed_are_tried(max_restarts, said):
    maker = Maker({("step", 1): RuntimeError("broke")}, always={"make"})
    exploring, _, _ = explorer(maker, max_restarts=max_restarts)
    with pytest.raises(EnvironmentFailedError, match=said):
        exploring.step(POLICY, 0)


def test_an_environment_that_raises_now_and_then_is_made_anew_for_ever():
    every = 15  # an episode of 10 steps ends in between
    maker = Maker({("step", k): RuntimeError("again") for k in range(every, 50 * every, every)})
    steps, _, _ = explore(maker, 40 * every, max_restarts=1)
    assert sum(len(step.restarts) for step in steps) > 30


def test_many_good_steps_forgive_a_restart_too(monkeypatch):
    monkeypatch.setattr(Scripted, "length", None)
    maker = Maker({("step", k * (GOOD_STEPS + 1)): RuntimeError("again") for k in (1, 2, 3)})
    exploring, env, _ = explorer(maker, max_restarts=1)
    for _ in range(3 * GOOD_STEPS):
        exploring.step(POLICY, 0)
    assert maker.calls["make"] == 3
    assert env.failures <= 1


def test_an_environment_that_fails_to_close_harms_nothing(caplog):
    maker = Maker(
        {("step", 1): RuntimeError("broke"), ("close", 1): OSError("gone"), ("close", 2): OSError()}
    )
    exploring, env, _ = explorer(maker)
    assert exploring.step(POLICY, 0).restarts == ("step",)
    env.close()
    assert maker.calls["close"] == 2
    assert caplog.text.count("agent 0: closing the environment failed with") == 2


def test_a_resumed_explorer_goes_on_bit_for_bit_in_the_episode_after_a_restart():
    def all_rows(resumed_at):
        maker = Maker({("step", 4): RuntimeError("broke")})
        exploring, _, _ = explorer(maker)
        rows = [exploring.step(POLICY, 0).rows for _ in range(resumed_at)]
        if resumed_at < 14:
            numbers, arrays = exploring.state()
            exploring, env, _ = explorer(Maker({}))
            exploring.resume(json.loads(json.dumps(numbers)), arrays)
            assert env.failures == 1
            assert exploring.replay()
        return rows + [exploring.step(POLICY, 0).rows for _ in range(14 - resumed_at)]

    assert np.array_equal(all_rows(14), all_rows(6))


def test_an_environment_that_raises_while_its_episode_is_played_again_begins_a_new_one(caplog):
    exploring, _, _ = explorer(Maker({}))
    for _ in range(4):
        exploring.step(POLICY, 0)
    numbers, arrays = exploring.state()
    maker = Maker({("step", 2): RuntimeError("broke")})
    resumed, _, schema = explorer(maker)
    resumed.resume(numbers, arrays)
    assert not resumed.replay()
    assert (
        "it raised RuntimeError: broke when it played its episode again; a new episode begins" in caplog.text
    )
    (row,) = resumed.step(POLICY, 0).rows
    assert schema.named(row[np.newaxis])["observation"][0].tolist() == [0, 0]
    assert maker.made[-1].seeds == [102]


# -- what an environment returns ----------------------------------------------------------------------

SHAPE = "the observation has another shape"


class Breach(Maker):
    """Makes Clocks whose steps with these numbers, from 1 over all of them, return something else."""

    def __init__(self, returned, steps):
        super().__init__({})
        self.returned = returned
        self.steps = steps

    def __call__(self):
        env, step = super().__call__(), Scripted.step
        env.step = lambda action: (
            self.returned if self.calls["step"] + 1 in self.steps and self._count() else step(env, action)
        )
        return env

    def _count(self):
        self.calls["step"] += 1
        return True


@pytest.mark.parametrize("how", breaches.STEPS)
def test_what_breaks_the_interface_while_exploring_is_as_if_it_had_raised(how, caplog):
    returned, said = breaches.STEPS[how]
    steps, rows, _ = explore(Breach(returned, {3}), 4)
    assert rows["observation"][:, 0].tolist() == [0, 1, 0, 1]
    assert rows["bootstrap"].tolist() == [1] * 4
    assert [step.restarts for step in steps] == [(), (), ("step",), ()]
    assert said in caplog.text
    assert "so it is made anew and a new episode begins" in caplog.text


def test_what_always_breaks_the_interface_in_the_same_way_is_not_tried_on_and_ends_its_own_agent():
    maker = Breach(breaches.STEPS[SHAPE][0], range(2, 99))
    exploring, _, _ = explorer(maker, max_restarts=5)
    exploring.step(POLICY, 0)
    with pytest.raises(EnvironmentFailedError) as caught:
        exploring.step(POLICY, 0)
    assert_one_sentence(
        caught.value,
        "agent 0 at step 1: the environment returned an observation of shape (3,)",
        "(in step), and again in the same way when it was made anew; correct the environment",
    )
    assert caught.value.exit_code not in LASTING_CODES
    assert maker.calls["make"] == 3  # the first was made anew after one good step, the second after none


@pytest.mark.parametrize(
    ("maker", "count", "restarts"),
    [
        (Breach(breaches.STEPS[SHAPE][0], {2, 5, 7, 11, 13}), 9, 5),
        (Maker({("step", k): RuntimeError("again") for k in range(1, 5)}), 2, 4),
    ],
    ids=["breaks the interface now and then", "raises in the same way"],
)
def test_what_does_not_always_break_the_interface_has_all_its_restarts(maker, count, restarts):
    steps, _, _ = explore(maker, count, max_restarts=restarts)
    assert sum(len(step.restarts) for step in steps) == restarts


def test_a_component_outside_its_space_while_exploring_is_as_if_the_step_had_raised(caplog):
    class Loses(worlds.DictObservation):
        """Its third observation lacks two components."""

        def observe(self):
            observed = super().observe()
            return {"time": observed["time"]} if self.time == 3 and not made[1:] else observed

    made = []

    def make():
        made.append(FlatObservation(Loses()))
        return made[-1]

    steps, rows, _ = explore(make, 4)
    assert [step.restarts for step in steps] == [(), (), ("step",), ()]
    assert rows["observation"][:, -1].tolist() == [0, 1, 0, 1]
    assert "an observation that lacks 'one'" in caplog.text


def test_a_first_reset_that_breaks_the_spaces_is_the_users_to_correct():
    exploring, _, _ = explorer(worlds.WrongShape)
    with pytest.raises(EnvironmentSpecError, match="shape") as caught:
        exploring.step(POLICY, 0)
    assert caught.value.exit_code in LASTING_CODES


def test_an_evaluation_that_breaks_the_interface_is_begun_anew():
    returned = breaches.STEPS["terminated is NaN"][0]
    result = evaluator(Breach(returned, {5}), max_restarts=1).evaluate(POLICY)
    assert (result.restarts, result.returns) == (1, (10.0, 10.0))


def test_an_evaluation_that_always_breaks_the_interface_in_the_same_way_is_begun_anew_once():
    maker = Breach(breaches.STEPS["terminated is NaN"][0], range(5, 99))
    with pytest.raises(EnvironmentFailedError, match="and again in the same way when it was made anew"):
        evaluator(maker, max_restarts=5).evaluate(POLICY)
    assert maker.calls["make"] == 4


def test_an_environment_for_an_evaluation_that_cannot_be_made_is_the_users_only_before_the_first_reset():
    config, watch = EnvConfig(id="worlds:RefusesToStart"), Watch("agent 0")
    trying = Evaluator(
        partial(evaluation_env, config, watch),
        schema_of(worlds.Clock(), "a world"),
        episodes=2,
        max_episode_steps=5,
        seed=1,
        max_restarts=2,
    )
    with pytest.raises(EnvironmentSpecError, match="failed with ValueError: no licence"):
        trying.evaluate(POLICY)
    watch.answered = True
    with pytest.raises(EnvironmentFailedError, match=r"no licence for this simulator \(in make\), after 2"):
        trying.evaluate(POLICY)


# -- evaluation ---------------------------------------------------------------------------------------


def evaluator(maker, **options):
    watch = Watch("agent 0")
    schema = schema_of(worlds.Clock(), "a world")
    return Evaluator(
        lambda: WatchedEnv(maker, watch), schema, episodes=2, max_episode_steps=20, seed=1, **options
    )


@pytest.mark.parametrize("call", [("step", 5), ("reset", 2)])
def test_an_evaluation_in_which_an_environment_raises_is_begun_anew(call):
    maker = Maker({call: RuntimeError("broke"), ("close", 1): OSError()})
    result = evaluator(maker, max_restarts=1).evaluate(POLICY)
    assert result.restarts == 1
    assert (result.returns, result.lengths) == ((10.0, 10.0), (10, 10))
    assert [env.closed for env in maker.made] == [1] * 4


def test_an_evaluation_that_always_fails_ends_in_one_sentence():
    with pytest.raises(EnvironmentFailedError) as caught:
        evaluator(Maker({}, always={"step"}), max_restarts=2, name="evaluation of agent 0").evaluate(POLICY)
    assert_one_sentence(caught.value, "evaluation of agent 0: the environment raised Collapsed", "after 2")


def test_what_a_watched_environment_raises_says_in_which_call():
    with pytest.raises(EnvironmentBroke, match="raised RuntimeError: broke in step"):
        WatchedEnv(Maker({("step", 1): RuntimeError("broke")}), Watch("x")).step(np.zeros(1))
