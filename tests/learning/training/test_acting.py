"""Acting: several environments explored with one policy, as an actor's thread does."""

import itertools
import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from worlds import StaggeredEnds

from dase_grpc import seeding
from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.errors import Halted
from dase_grpc.learning.agents.snapshots import Behaviour
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.learning.envs.restarts import RestartableEnv
from dase_grpc.learning.training.collection import Acting, Rollout, actor_explorers
from dase_grpc.metrics.nodes import ActorMetrics
from dase_grpc.process.watchdog import Watch

SCHEMA = schema_of(StaggeredEnds(), "worlds:StaggeredEnds")


class Counting:
    """A policy that gives a tenth for everything, and remembers how many it was asked for at once."""

    def __init__(self):
        self.asked = []

    def act(self, observation):
        self.asked.append(len(observation))
        return np.full((len(observation), 1), 0.1, np.float32)


def explorers(count, *, actor=1, agent_id=0, noise=0.1, seed=3, envs=None, n_step=1):
    envs = envs or [StaggeredEnds() for _ in range(count)]
    config = AgentConfig(exploration_noise=noise, n_step=n_step)
    return actor_explorers(envs, SCHEMA, config=config, agent_id=agent_id, seed=seed, actor=actor)


def rows_by_env(rollout, rounds, behaviour):
    taken = [list(rollout.round(behaviour)) for _ in range(rounds)]
    return [[row for step in one for row in step.rows] for one in zip(*taken, strict=True)]


def column(row, name):
    return row[SCHEMA.columns[name]]


def test_each_round_is_one_step_of_each_environment_and_one_call_of_the_policy():
    policy = Counting()
    rows = rows_by_env(Rollout(explorers(3)), 40, Behaviour(policy, 7))
    assert policy.asked == [3] * 40
    assert [len(each) for each in rows] == [40] * 3
    assert all(row.view(np.uint32)[-2:].tolist() == [0, 7] for each in rows for row in each)


def test_within_an_episode_each_row_begins_where_the_one_before_ended_and_none_is_between_two_episodes():
    ends = 0
    for rows in rows_by_env(Rollout(explorers(3)), 60, Behaviour(Counting(), 1)):
        for row, after in itertools.pairwise(rows):
            time, next_time = column(row, "observation")[0], column(row, "next_observation")[0]
            assert next_time == time + 1
            if column(after, "observation")[0] == 0:
                ends += 1
            else:
                assert (column(after, "observation") == column(row, "next_observation")).all()
    assert ends >= 9


def test_environments_end_their_episodes_apart_and_no_two_of_them_are_alike():
    envs = [StaggeredEnds() for _ in range(3)]
    rows_by_env(Rollout(explorers(3, envs=envs)), 60, Behaviour(Counting(), 1))
    seeds = [set(env.seeds) for env in envs]
    assert all(len(each) >= 4 for each in seeds)
    assert not seeds[0] & seeds[1]
    assert not seeds[1] & seeds[2]


@pytest.mark.parametrize("other", [{"actor": 2}, {"agent_id": 1}, {"seed": 4}])
def test_no_actor_repeats_the_episodes_or_the_noise_of_another(other):
    def played(**of):
        envs = [StaggeredEnds()]
        ((rows),) = rows_by_env(Rollout(explorers(1, envs=envs, **of)), 60, Behaviour(Counting(), 1))
        return {column(row, "action")[0] for row in rows if abs(column(row, "action")[0]) < 1}, set(
            envs[0].seeds
        )

    noise, seeds = played()
    other_noise, other_seeds = played(**other)
    assert played() == (noise, seeds)
    assert not noise & other_noise
    assert not seeds & other_seeds


def test_no_actor_plays_an_episode_of_a_learner_or_of_an_evaluation():
    envs = [StaggeredEnds()]
    rows_by_env(Rollout(explorers(1, envs=envs)), 200, Behaviour(None, 0))
    purpose = seeding.Purpose
    learners = {seeding.integer(3, purpose.ENVIRONMENT, 0, number) for number in range(200)}
    assert not learners & set(envs[0].seeds)
    assert all(seed % 2 == 0 for seed in envs[0].seeds)  # those of evaluations are odd


def test_without_a_policy_the_actions_are_uniform():
    ((rows),) = rows_by_env(Rollout(explorers(1)), 400, Behaviour(None, 0))
    actions = np.array([column(row, "action")[0] for row in rows])
    assert abs(actions.mean()) < 0.1
    assert np.abs(actions).max() > 0.98
    assert 0.28 < actions.var() < 0.39


def test_an_environment_that_breaks_is_made_anew_and_the_others_go_on():
    envs = [
        RestartableEnv(
            lambda kwargs=kwargs: make_env("worlds:RaisesAtStep", kwargs),
            Watch("an actor"),
            max_restarts=3,
            pause=lambda seconds: None,
        )
        for kwargs in ({"at": 5}, {"at": 1_000})
    ]
    rollout = Rollout(explorers(2, envs=envs))
    explored = [list(rollout.round(Behaviour(Counting(), 1))) for _ in range(9)]
    restarts = [[step.restarts for step in one] for one in zip(*explored, strict=True)]
    assert ("step",) in restarts[0]
    assert set(restarts[1]) == {()}
    assert all(len(step.rows) == 1 for steps in explored for step in steps)


class Guide:
    def __init__(self, *behaviours):
        self._behaviours = list(behaviours)

    def behaviour(self):
        return self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]


class Sink:
    def __init__(self, room=1_000):
        self.rows, self.room, self.on_row = [], room, lambda count: None

    def store(self, row):
        if len(self.rows) >= self.room:
            raise Halted
        self.rows.append(row)
        self.on_row(len(self.rows))


def acting(guide, sink, *, count=2, clock=lambda: 0.0, envs=None, n_step=1):
    metrics = ActorMetrics(CollectorRegistry(), 0)
    rollout = Rollout(explorers(count, envs=envs, n_step=n_step))
    return Acting(rollout, guide, sink, metrics=metrics, name="an actor", clock=clock), metrics


def test_every_transition_goes_to_the_sink_with_the_version_acted_by_until_it_is_halted():
    sink, halt = Sink(), threading.Event()
    sink.on_row = lambda count: halt.set() if count >= 20 else None
    guide = Guide(Behaviour(Counting(), 3), Behaviour(Counting(), 3), Behaviour(Counting(), 9))
    actor, metrics = acting(guide, sink)
    actor.explore(halt)
    versions = [int(row.view(np.uint32)[-1]) for row in sink.rows]
    assert versions == [3] * 4 + [9] * 16
    assert (actor.env_steps, actor.version, metrics.env_steps._value.get()) == (20, 9, 20)


def test_a_sink_that_is_closed_ends_it():
    sink = Sink(room=5)
    actor, _ = acting(Guide(Behaviour(None, 0)), sink)
    actor.explore(threading.Event())
    assert len(sink.rows) == 5


def test_what_is_held_for_n_step_returns_goes_to_the_sink_when_it_is_halted():
    sink, halt = Sink(), threading.Event()
    sink.on_row = lambda count: halt.set() if count >= 30 else None
    actor, _ = acting(Guide(Behaviour(None, 0)), sink, count=3, n_step=4)
    actor.explore(halt)
    assert len(sink.rows) == actor.env_steps > 30
    assert len({row.tobytes() for row in sink.rows}) == actor.env_steps


def test_a_sink_that_is_closed_takes_nothing_of_what_is_held():
    sink, halt = Sink(room=5), threading.Event()
    sink.on_row = lambda count: halt.set() if count >= 5 else None
    actor, _ = acting(Guide(Behaviour(None, 0)), sink, count=1, n_step=4)
    actor.explore(halt)
    assert len(sink.rows) == 5


def test_the_rate_is_that_of_the_latest_steps():
    now, halt, sink = [0.0], threading.Event(), Sink()
    actor, _ = acting(Guide(Behaviour(None, 0)), sink, count=1, clock=lambda: now[0])

    def tick(count):
        now[0] += 0.1 if count < 50 else 0.5
        if count == 70:
            halt.set()

    sink.on_row = tick
    actor.explore(halt)
    assert actor.env_steps_per_second == pytest.approx(2.0)


def test_what_is_not_finite_is_counted_and_left_out(caplog):
    sink, halt = Sink(), threading.Event()
    sink.on_row = lambda count: halt.set() if count >= 8 else None
    env = make_env("worlds:NanReward", {})
    actor, metrics = acting(Guide(Behaviour(None, 0)), sink, count=1, envs=[env])
    actor.explore(halt)
    assert actor.env_steps == 9
    assert metrics._refused.labels("0", "reward")._value.get() == 1
    assert "its reward is not finite" in caplog.text
