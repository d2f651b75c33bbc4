"""What a learner does, and when; and how it ends."""

import math
import threading

import numpy as np
import pytest
import torch
import worlds
from contracts.sentences import assert_one_sentence
from learning.training.bench import BATCH, OWN, Bench, trained
from worlds import PointGoal

from dase_grpc.errors import DivergedError, EnvironmentFailedError, Halted
from dase_grpc.learning.agents.snapshots import Behaviour
from dase_grpc.learning.envs.restarts import RestartableEnv
from dase_grpc.learning.training.updates import DIVERGED_AFTER
from dase_grpc.process.watchdog import Watch


def test_everything_happens_in_its_order():
    assert ", ".join(trained(train__steps=4, eval__every=2, train__log_every=3).events) == (
        "evaluation at 0, store, "
        "store, batch, update, evaluation at 2, "
        "store, batch, update, metrics at 3, "
        "store, batch, update, evaluation at 4, "
        "metrics at 4, checkpoint at 4"
    )


@pytest.mark.parametrize(("start_steps", "updates"), [(0, 6), (1, 6), (2, 5), (6, 1), (7, 0)])
def test_the_first_update_follows_step_number_start_steps_and_each_later_step_brings_one(
    start_steps, updates
):
    bench = trained(agent__start_steps=start_steps)
    assert bench.agent.updates == updates
    assert len(bench.sink.rows) == 6


class OneBehind:
    """Acts by a policy of its own, one update behind."""

    def __init__(self, bench):
        self.version, self.held = -1, {"age": torch.zeros(())}
        self._bench = bench

    def behaviour(self):
        return Behaviour(self, self.version)

    def act(self, observation):
        self._bench.events.append(f"act by {self.version}")
        return np.zeros((len(observation), 1), np.float32)

    def updated(self):
        self.version += 1

    def tensors(self):
        return self.held

    def resumed(self):
        self.version = int(self.held["age"])


def test_a_learner_acts_by_what_its_guide_says_and_stores_the_version_of_that():
    bench = Bench(train__steps=5)
    bench.guide = guide = OneBehind(bench)
    bench.train()
    versions = bench.schema.policy_versions(np.stack(bench.sink.rows)).view(np.int32)
    assert versions.tolist() == [-1, -1, 0, 1, 2]
    acts = [event for event in bench.events if event.startswith("act")]
    assert acts == ["act by 0", "act by 1", "act by 2"]
    assert guide.version == bench.agent.updates - 1


def test_a_checkpoint_keeps_what_a_guide_goes_on_from():
    bench = Bench(train__steps=3)
    bench.guide = OneBehind(bench)
    bench.guide.held["age"].fill_(7)
    learner = bench.learner()
    saved = learner._state.save(bench.agent)
    assert int(saved.tensors["behaviour.age"]) == 7
    bench.guide.held["age"].fill_(0)
    learner._state.resume(saved, bench.agent)
    assert bench.guide.version == 7


@pytest.mark.parametrize(("steps", "evaluated"), [(7, [0, 3, 6, 7]), (6, [0, 3, 6])])
def test_the_last_step_is_evaluated_once_whether_or_not_the_budget_is_a_multiple_of_the_period(
    steps, evaluated
):
    bench = trained(train__steps=steps, eval__every=3)
    assert [evaluation["step"] for evaluation in bench.journal.evaluations] == evaluated


def test_evaluations_say_how_long_the_run_has_taken_even_if_the_clock_began_at_zero():
    first, last = (each["wall_seconds"] for each in trained(train__steps=2).journal.evaluations)
    assert 0 < first < last


def test_the_final_checkpoint_holds_the_state_after_the_last_update_and_the_latest_evaluation():
    bench = trained()
    ((step, tensors, scores),) = bench.journal.checkpoints
    assert (step, int(tensors["updates"])) == (6, 5)
    assert scores == {"evaluation": bench.journal.evaluations[-1]["return_mean"], "evaluation_step": 6}


def test_between_checkpoints_lie_checkpoint_every_steps_and_the_last_is_not_kept_twice():
    bench = trained(train__steps=6, train__checkpoint_every=2, eval__every=2)
    kept = [(step, int(tensors["updates"])) for step, tensors, _ in bench.journal.checkpoints]
    assert kept == [(2, 1), (4, 3), (6, 5)]
    latest = bench.journal.evaluations[1]  # of the checkpoint's own step: it is made before
    assert bench.journal.checkpoints[0][2] == {"evaluation": latest["return_mean"], "evaluation_step": 2}


def test_exploration_is_recorded_with_the_version_of_the_policy_that_acted():
    bench = trained()
    versions = bench.schema.named(np.stack(bench.sink.rows))["policy_version"]
    assert versions.tolist() == [0, 0, 1, 2, 3, 4]


# -- weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run", [{"agents": 1}, {"collectors": [0, 1] * 4, "divergence": "none"}], ids=["internal", "uncorrected"]
)
def test_an_internal_batch_is_not_weighed_and_without_correction_external_rows_count_in_full(run):
    bench = trained(**run)
    assert all(weight.tolist() == [1.0] * BATCH for weight in bench.agent.weights)
    assert (bench.journal.records[-1]["similarity_weight"] is None) == ("agents" in run)


def test_external_rows_get_the_similarity_weight_and_internal_ones_count_in_full():
    weight = trained(collectors=[0, 1] * 4).agent.weights[0]
    assert weight[::2].tolist() == [1.0] * 4
    assert (weight[1::2] == weight[1]).all()
    assert 0 < weight[1] < 1


def test_an_isolated_agent_skips_and_counts_updates_whose_batch_has_no_row_of_its_own():
    bench = Bench(collectors=[1] * BATCH, divergence="isolated")
    assert bench.train().progress.state == "finished"
    assert bench.agent.updates == 0
    assert bench.journal.records[-1]["skipped_updates"] == 5
    assert bench.metric("learner_skipped_updates_total", reason="no_weight") == 5
    assert bench.metric("learner_updates_total") == 0


def test_a_batch_without_a_row_of_its_own_is_used_if_it_has_weight():
    assert trained(collectors=[1] * BATCH).agent.updates == 5


def test_rows_of_others_that_cannot_be_measured_are_counted_as_degenerate():
    record = trained(collectors=[0] * (BATCH - 1) + [1]).journal.records[-1]
    assert (record["degenerate_updates"], record["similarity_weight"]) == (5, 0.0)


def test_where_waiting_for_a_batch_would_not_help_the_update_is_skipped_and_counted():
    bench = Bench()
    bench.source.empty = True
    bench.train()
    assert bench.agent.updates == 0
    assert bench.journal.records[-1]["skipped_updates"] == 5
    assert bench.metric("learner_skipped_updates_total", reason="no_batch") == 5


# -- rows that are refused ----------------------------------------------------------------------------


def test_a_transition_that_is_not_finite_is_counted_and_not_sent_and_training_goes_on(caplog):
    bench = trained(worlds.NanReward(), train__steps=12)
    assert len(bench.sink.rows) == 11
    assert bench.journal.records[-1]["refused"] == {"reward": 1}
    assert bench.metric("explorer_refused_transitions_total", reason="reward") == 1
    assert bench.metric("explorer_env_steps_total") == 12
    (warning,) = [each for each in caplog.messages if "left out" in each]
    assert_one_sentence(warning, "agent 0 at step 3", "reward", "not finite", "make the environment return")


def test_a_refused_transition_does_not_count_towards_the_start_so_that_the_buffer_holds_enough():
    bench = trained(worlds.NanReward(), train__steps=5, agent__start_steps=3)
    assert bench.events[1:7] == ["store", "store", "store", "batch", "update", "store"]


def test_an_environment_that_gives_only_nan_is_trained_through_without_an_update():
    bench = Bench(worlds.AlwaysNan(), train__steps=150, agent__start_steps=0)
    assert bench.train().progress.step == 150
    assert (bench.sink.rows, bench.agent.updates) == ([], 0)


# -- the end ------------------------------------------------------------------------------------------


def test_halt_ends_training_after_the_step_with_a_checkpoint():
    bench, halt = Bench(), threading.Event()
    bench.sink.store = lambda row: halt.set()
    learner = bench.train(halt)
    assert bench.events == ["evaluation at 0", "metrics at 1", "checkpoint at 1"]
    assert (learner.progress.state, learner.done) == ("stopped", False)


@pytest.mark.parametrize(("end", "call"), [("sink", "store"), ("source", "next")])
def test_a_closed_sink_or_source_ends_training_with_a_checkpoint(end, call):
    bench = Bench()

    def halted(*_):
        raise Halted

    setattr(getattr(bench, end), call, halted)
    assert bench.train().progress.state == "stopped"
    assert bench.events[-1].startswith("checkpoint at")


def test_halt_ends_an_evaluation_that_is_going_on():
    bench, halt = Bench(worlds.Endless(), eval__max_episode_steps=1_000), threading.Event()
    asked = []

    def act(observation):
        asked.append(observation)
        if len(asked) == 3:
            halt.set()
        return np.zeros((len(observation), 1), np.float32)

    bench.agent.act = act
    bench.train(halt)
    assert len(asked) == 3
    assert bench.events == ["checkpoint at 0"]


@pytest.mark.parametrize(("at", "kept"), [(2, []), (5, [2, 4])])
def test_what_the_environment_raises_is_raised_and_no_checkpoint_pretends_that_all_is_well(at, kept):
    bench = Bench(worlds.RaisesAtStep(at), evaluated=worlds.Clock, train__checkpoint_every=2)
    with pytest.raises(RuntimeError, match=f"broke at step {at}"):
        bench.train()
    assert [step for step, _, _ in bench.journal.checkpoints] == kept


def test_a_critic_loss_that_is_not_finite_ends_training_in_one_sentence():
    bench = Bench(train__steps=DIVERGED_AFTER + 10)
    bench.agent.ruined = True
    with pytest.raises(DivergedError) as caught:
        bench.train()
    assert_one_sentence(
        caught.value,
        f"agent {OWN} at step {DIVERGED_AFTER + 1} has diverged",
        f"the last {DIVERGED_AFTER} updates of its critic had a loss or a gradient that is not finite",
        "lower agent.actor_lr or agent.critic_lr, or scale the reward",
        "(the last checkpoint, if there is one, is kept)",
    )
    assert bench.journal.checkpoints == []


def test_updates_that_are_left_out_now_and_then_are_counted_and_do_not_end_training():
    steps = 2 * DIVERGED_AFTER
    bench = Bench(train__steps=steps, train__log_every=DIVERGED_AFTER, agent__start_steps=0)
    learner = bench.learner()
    learner.begin(threading.Event())
    for number in range(steps):
        bench.agent.ruined = number not in (DIVERGED_AFTER - 1, DIVERGED_AFTER + 20)
        learner.step()
    learner.finish()
    counted = [record["skipped_updates"] for record in bench.journal.records]
    assert counted == [DIVERGED_AFTER - 1, DIVERGED_AFTER - 1]
    assert bench.metric("learner_skipped_updates_total", reason="critic_not_finite") == sum(counted)
    assert bench.journal.checkpoints


@pytest.mark.parametrize(("every", "at", "records"), [(4, 4, []), (100, 6, [6])])
def test_no_checkpoint_makes_room_for_one_of_an_agent_that_has_diverged(every, at, records):
    bench = Bench(train__checkpoint_every=every)
    bench.agent.state_dict = lambda: {"critic.0.weight": torch.tensor([0.0, math.inf])}
    with pytest.raises(DivergedError, match=rf"agent 0 at step {at} has diverged: critic\.0\.weight is not"):
        bench.train()
    assert bench.journal.checkpoints == []
    assert [record["step"] for record in bench.journal.records] == records


@pytest.mark.parametrize("good_steps", [0, 3])
def test_the_restarts_before_an_environment_is_given_up_are_counted(good_steps):
    steps = []

    class Fails(PointGoal):
        def step(self, action):
            steps.append(action)
            if len(steps) > good_steps:
                raise RuntimeError("broke")
            return super().step(action)

    env = RestartableEnv(Fails, Watch("agent 0"), max_restarts=2, pause=lambda _: None)
    bench = Bench(env, evaluated=PointGoal)
    with pytest.raises(EnvironmentFailedError):
        bench.train()
    records = [(each["step"], each["env_restarts"]) for each in bench.journal.records]
    assert records == [(good_steps, {"step": 2})]
    assert bench.metric("explorer_env_restarts_total", reason="step") == 2
    assert [step for step, *_ in bench.journal.checkpoints] == [good_steps]


def test_an_agent_that_has_diverged_does_not_hide_what_its_environment_did(caplog):
    bench = Bench()
    bench.agent.state_dict = lambda: {"actor.0.bias": torch.tensor([math.nan])}

    def failed(_):
        raise EnvironmentFailedError("the environment raised")

    bench.sink.store = failed
    with pytest.raises(EnvironmentFailedError):
        bench.train()
    assert bench.journal.checkpoints == []
    assert "agent 0 at step 1 has diverged: actor.0.bias is not finite" in caplog.text


def test_a_policy_that_diverges_is_named_by_the_evaluation_that_notices():
    bench = Bench()
    bench.agent.act = lambda observation: np.full((len(observation), 1), np.nan, np.float32)
    with pytest.raises(DivergedError, match="agent 0 at step 0 has diverged: its actions are not finite"):
        bench.train()


def test_the_environment_stays_open_for_its_maker_to_close():
    assert trained(worlds.Clock()).env.closed == 0
