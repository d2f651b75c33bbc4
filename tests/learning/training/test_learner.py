import json
import math
import threading
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch
import worlds
from contracts.sentences import assert_one_sentence
from patience import PATIENCE_S
from worlds import PointGoal

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.errors import DivergedError, EnvironmentFailedError, Halted, RunDirectoryError
from dase_grpc.learning.agents.optimiser import Steps
from dase_grpc.learning.agents.snapshots import Behaviour, LearnersGuide
from dase_grpc.learning.envs.evaluation import Evaluator
from dase_grpc.learning.envs.explorer import Explorer
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.learning.envs.restarts import RestartableEnv
from dase_grpc.learning.similarity.weigher import SimilarityWeigher
from dase_grpc.learning.training.learner import Learner
from dase_grpc.learning.training.parts import LearnerParts
from dase_grpc.learning.training.state import Saved
from dase_grpc.learning.training.updates import DIAGNOSE_EVERY, DIVERGED_AFTER
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.process.watchdog import Watch

BATCH = 8
OWN = 0
RECORD_KEYS = {
    "step",
    "wall_seconds",
    "updates",
    "updates_per_second",
    "steps_per_second",
    "episode_return",
    "episodes",
    "critic_loss",
    "actor_loss",
    "q_mean",
    "skipped_updates",
    "degenerate_updates",
    "refused",
    "env_restarts",
    "similarity",
    "similarity_weight",
    "divergence_covariance",
    "divergence_mean",
    "divergence_covariance_by_source",
    "divergence_mean_by_source",
    "external_share",
    "effective_batch",
    "policy_lag",
    "buffer_size",
}


@dataclass
class StubAgent:
    """Does nothing, and notes what it was told."""

    events: list
    losses: dict = field(default_factory=lambda: {"critic_loss": 2.0, "q_mean": 3.0, "actor_loss": -1.0})
    updates: int = 0
    weights: list = field(default_factory=list)
    tried: int = 0
    left_out: int = 0
    ruined: bool = False
    uses_actions: bool = True

    def act(self, observation):
        return np.zeros((len(observation), 1), np.float32)

    def policy_actions(self, observation):
        return torch.zeros(len(observation), 1)

    def update(self, batch, weight, *, actions=None):
        self.updates += 1
        self.tried += 1
        self.left_out += self.ruined
        self.weights.append(weight.clone())
        self.events.append("update")
        return {name: torch.tensor(value) for name, value in self.losses.items()}

    def take_steps(self):
        steps = Steps(self.tried, self.left_out)
        self.tried = self.left_out = 0
        return {"critic": steps}

    def state_dict(self):
        return {"updates": torch.tensor(self.updates)}


@dataclass
class ListSink:
    events: list
    rows: list = field(default_factory=list)

    def store(self, row):
        self.events.append("store")
        self.rows.append(row)


@dataclass
class ScriptedSource:
    """Gives batches of rows that the agents in `collectors` collected, with slightly varied actions."""

    schema: object
    events: list
    collectors: list
    versions: int = 0
    empty: bool = False

    def next(self):
        self.events.append("batch")
        if self.empty:
            return None
        rows = np.zeros((len(self.collectors), self.schema.width), np.float32)
        rows[:, self.schema.columns["action"]] = np.linspace(-0.3, 0.3, len(rows))[:, np.newaxis]
        rows[:, -2:].view(np.int32)[:, 0] = self.collectors
        rows[:, -2:].view(np.uint32)[:, 1] = self.versions
        rows.flags.writeable = False
        return rows, 1_000


@dataclass
class RecordingJournal:
    events: list
    evaluations: list = field(default_factory=list)
    records: list = field(default_factory=list)
    checkpoints: list = field(default_factory=list)

    def evaluation(self, **values):
        self.events.append(f"evaluation at {values['step']}")
        self.evaluations.append(values)

    def metrics(self, values):
        self.events.append(f"metrics at {values['step']}")
        self.records.append(values)

    def checkpoint(self, *, step, saved, scores):
        self.events.append(f"checkpoint at {step}")
        self.checkpoints.append((step, saved.agent, scores))


class Ticks:
    """A clock that goes on by a second whenever it is read, from 0."""

    def __init__(self):
        self.now = -1.0

    def __call__(self):
        self.now += 1.0
        return self.now


class Bench:
    """A learner among fakes."""

    def __init__(self, env=None, *, collectors=(OWN,) * BATCH, agents=2, divergence="jeffreys", **settings):
        self.config: RunConfig = resolve(
            {
                "train": {"agents": agents, "steps": 6, "log_every": 100},
                "agent": {"batch_size": BATCH, "start_steps": 2},
                "replay": {"min_size": 1},
                "eval": {"every": 100, "episodes": 1, "max_episode_steps": 3},
            },
            {"dps": {"divergence": divergence}},
            *({section: {key: value}} for (section, key), value in _keys(settings)),
        )
        self.env = PointGoal() if env is None else env
        self.events: list[str] = []
        schema = schema_of(self.env, "a world")
        self.agent = StubAgent(self.events)
        self.sink = ListSink(self.events)
        self.source = ScriptedSource(schema, self.events, list(collectors))
        self.journal = RecordingJournal(self.events)
        self.registry = make_registry()
        self.schema = schema
        self.make_evaluated = PointGoal
        self.guide = None

    def learner(self) -> Learner:
        config, rng = self.config, np.random.default_rng(0)
        return Learner(
            LearnerParts(
                config=config,
                schema=self.schema,
                agent_id=OWN,
                device=torch.device("cpu"),
                agent=self.agent,
                explorer=Explorer(
                    self.env,
                    self.schema,
                    agent_id=OWN,
                    rng=rng,
                    episode_seed=lambda episode: 2 + 2 * episode,
                    start_steps=config.agent.start_steps,
                    noise=0.1,
                ),
                evaluator=Evaluator(
                    self.make_evaluated,
                    self.schema,
                    episodes=config.eval.episodes,
                    max_episode_steps=config.eval.max_episode_steps,
                    seed=1,
                ),
                weigher=SimilarityWeigher(config.dps, own_id=OWN, agents=config.train.agents),
                sink=self.sink,
                source=self.source,
                journal=self.journal,
                metrics=LearnerMetrics(self.registry, OWN),
                clock=Ticks(),
                guide=self.guide or LearnersGuide(self.agent),
            )
        )

    def train(self) -> Learner:
        learner = self.learner()
        learner.train(threading.Event())
        return learner

    def metric(self, name, **labels):
        return self.registry.get_sample_value(f"dase_{name}", {"agent_id": str(OWN), **labels})


def _keys(settings):
    return ((tuple(name.split("__")), value) for name, value in settings.items())


# -- what happens when --------------------------------------------------------------------------------


def test_everything_happens_in_its_order():
    bench = Bench(train__steps=4, eval__every=2, train__log_every=3)
    bench.train()
    assert ", ".join(bench.events) == (
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
    bench = Bench(agent__start_steps=start_steps)
    bench.train()
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
    assert [event for event in bench.events if event.startswith("act")] == [
        "act by 0",
        "act by 1",
        "act by 2",
    ]
    assert guide.version == bench.agent.updates - 1


def test_a_checkpoint_keeps_what_a_guide_goes_on_from():
    bench = Bench(train__steps=3)
    bench.guide = OneBehind(bench)
    bench.guide.held["age"].fill_(7)
    learner = bench.learner()
    saved = learner._state.save(StateAgent(bench))
    assert int(saved.tensors["behaviour.age"]) == 7
    bench.guide.held["age"].fill_(0)
    learner._state.resume(saved, StateAgent(bench))
    assert bench.guide.version == 7


class StateAgent(StubAgent):
    def __init__(self, bench):
        super().__init__(bench.events)

    def load_state_dict(self, state):
        self.updates = int(state["updates"])


def test_a_last_evaluation_is_made_although_the_budget_is_no_multiple_of_its_period():
    bench = Bench(train__steps=7, eval__every=3)
    bench.train()
    assert [evaluation["step"] for evaluation in bench.journal.evaluations] == [0, 3, 6, 7]


def test_an_evaluation_that_is_due_at_the_end_is_made_once():
    bench = Bench(train__steps=6, eval__every=3)
    bench.train()
    assert [evaluation["step"] for evaluation in bench.journal.evaluations] == [0, 3, 6]


def test_evaluations_say_how_long_the_run_has_taken_even_if_the_clock_began_at_zero():
    bench = Bench(train__steps=2)
    bench.train()
    first, last = (evaluation["wall_seconds"] for evaluation in bench.journal.evaluations)
    assert 0 < first < last


def test_the_final_checkpoint_holds_the_state_after_the_last_update_and_the_latest_evaluation():
    bench = Bench()
    bench.train()
    ((step, tensors, scores),) = bench.journal.checkpoints
    assert (step, int(tensors["updates"])) == (6, 5)
    assert scores == {"evaluation": bench.journal.evaluations[-1]["return_mean"], "evaluation_step": 6}


def test_between_checkpoints_lie_checkpoint_every_steps_and_the_last_is_not_kept_twice():
    bench = Bench(train__steps=6, train__checkpoint_every=2, eval__every=2)
    bench.train()
    kept = [(step, int(tensors["updates"])) for step, tensors, _ in bench.journal.checkpoints]
    assert kept == [(2, 1), (4, 3), (6, 5)]
    latest = bench.journal.evaluations[1]  # of the checkpoint's own step: it is made before
    assert bench.journal.checkpoints[0][2] == {"evaluation": latest["return_mean"], "evaluation_step": 2}


def test_exploration_is_recorded_with_the_version_of_the_policy_that_acted():
    bench = Bench()
    bench.train()
    versions = bench.schema.named(np.stack(bench.sink.rows))["policy_version"]
    assert versions.tolist() == [0, 0, 1, 2, 3, 4]


# -- weights ------------------------------------------------------------------------------------------


def test_an_internal_batch_is_not_weighed():
    bench = Bench(agents=1)
    bench.train()
    assert all(weight.tolist() == [1.0] * BATCH for weight in bench.agent.weights)
    assert bench.journal.records[-1]["similarity_weight"] is None


def test_external_rows_get_the_similarity_weight_and_internal_ones_count_in_full():
    bench = Bench(collectors=[0, 1] * 4)
    bench.train()
    weight = bench.agent.weights[0]
    assert weight[::2].tolist() == [1.0] * 4
    assert (weight[1::2] == weight[1]).all()
    assert 0 < weight[1] < 1


def test_without_correction_external_rows_count_in_full():
    bench = Bench(collectors=[0, 1] * 4, divergence="none")
    bench.train()
    assert all(weight.tolist() == [1.0] * BATCH for weight in bench.agent.weights)


def test_an_isolated_agent_skips_and_counts_updates_whose_batch_has_no_row_of_its_own():
    bench = Bench(collectors=[1] * BATCH, divergence="isolated")
    learner = bench.train()
    assert bench.agent.updates == 0
    assert bench.journal.records[-1]["skipped_updates"] == 5
    assert bench.metric("learner_skipped_updates_total", reason="no_weight") == 5
    assert bench.metric("learner_updates_total") == 0
    assert learner.progress.state == "finished"


def test_a_batch_without_a_row_of_its_own_is_used_if_it_has_weight():
    bench = Bench(collectors=[1] * BATCH)
    bench.train()
    assert bench.agent.updates == 5


def test_rows_of_others_that_cannot_be_measured_are_counted_as_degenerate():
    bench = Bench(collectors=[0] * (BATCH - 1) + [1])
    bench.train()
    assert bench.journal.records[-1]["degenerate_updates"] == 5
    assert bench.journal.records[-1]["similarity_weight"] == 0.0


def test_where_waiting_for_a_batch_would_not_help_the_update_is_skipped_and_counted():
    bench = Bench()
    bench.source.empty = True
    bench.train()
    assert bench.agent.updates == 0
    assert bench.journal.records[-1]["skipped_updates"] == 5
    assert bench.metric("learner_skipped_updates_total", reason="no_batch") == 5


# -- rows that are refused ----------------------------------------------------------------------------


def test_a_transition_that_is_not_finite_is_counted_and_not_sent_and_training_goes_on():
    bench = Bench(worlds.NanReward(), train__steps=10)
    bench.make_evaluated = worlds.NanReward
    bench.train()
    assert len(bench.sink.rows) == 9
    assert bench.journal.records[-1]["refused"] == {"reward": 1}
    assert bench.metric("explorer_refused_transitions_total", reason="reward") == 1
    assert bench.metric("explorer_env_steps_total") == 10


def test_a_refused_transition_does_not_count_towards_the_start_so_that_the_buffer_holds_enough():
    bench = Bench(worlds.NanReward(), train__steps=5, agent__start_steps=3)
    bench.make_evaluated = worlds.NanReward
    bench.train()
    assert bench.events[1:7] == ["store", "store", "store", "batch", "update", "store"]


def test_an_environment_that_gives_only_nan_is_trained_through_without_an_update():
    bench = Bench(worlds.AlwaysNan(), train__steps=150, agent__start_steps=0)
    bench.make_evaluated = worlds.AlwaysNan
    learner = bench.train()
    assert bench.sink.rows == []
    assert bench.agent.updates == 0
    assert learner.progress.step == 150


# -- the end ------------------------------------------------------------------------------------------


def test_halt_ends_training_after_the_step_with_a_checkpoint():
    bench, halt = Bench(), threading.Event()
    bench.sink.store = lambda row: halt.set()
    learner = bench.learner()
    learner.train(halt)
    assert bench.events == ["evaluation at 0", "metrics at 1", "checkpoint at 1"]
    assert learner.progress.state == "stopped"
    assert not learner.done


@pytest.mark.parametrize("closed", ["sink", "source"])
def test_a_closed_sink_or_source_ends_training_with_a_checkpoint(closed):
    bench = Bench()

    def halted(*_):
        raise Halted

    if closed == "sink":
        bench.sink.store = halted
    else:
        bench.source.next = halted
    assert bench.train().progress.state == "stopped"
    assert bench.events[-1].startswith("checkpoint at")


def test_halt_ends_an_evaluation_that_is_going_on():
    bench, halt = Bench(eval__max_episode_steps=1_000), threading.Event()
    asked = []

    def evaluated():
        return worlds.Endless()

    def act(observation):
        asked.append(observation)
        if len(asked) == 3:
            halt.set()
        return np.zeros((len(observation), 1), np.float32)

    bench.agent.act = act
    bench.make_evaluated = evaluated
    bench.env = worlds.Endless()
    bench.schema = schema_of(bench.env, "a world")
    bench.learner().train(halt)
    assert len(asked) == 3
    assert bench.journal.evaluations == []
    assert bench.events == ["checkpoint at 0"]


def test_what_the_environment_raises_is_raised_and_no_checkpoint_pretends_that_all_is_well():
    bench = Bench(worlds.RaisesAtStep(at=2))
    bench.make_evaluated = worlds.Clock
    with pytest.raises(RuntimeError, match="broke at step 2"):
        bench.train()
    assert bench.journal.checkpoints == []


def test_an_agent_that_fails_keeps_its_checkpoints_until_then():
    bench = Bench(worlds.RaisesAtStep(at=5), train__checkpoint_every=2)
    bench.make_evaluated = worlds.Clock
    with pytest.raises(RuntimeError, match="broke at step 5"):
        bench.train()
    assert [step for step, _, _ in bench.journal.checkpoints] == [2, 4]


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
        "the last checkpoint is kept",
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


def test_no_checkpoint_makes_room_for_one_of_an_agent_that_has_diverged():
    bench = Bench(train__checkpoint_every=4)
    bench.agent.state_dict = lambda: {"critic.0.weight": torch.tensor([0.0, math.inf])}
    with pytest.raises(DivergedError, match=r"agent 0 at step 4 has diverged: critic\.0\.weight is not"):
        bench.train()
    assert bench.journal.checkpoints == []


def test_the_last_checkpoint_is_not_one_of_an_agent_that_has_diverged_either():
    bench = Bench()
    bench.agent.state_dict = lambda: {"actor.0.bias": torch.tensor([math.nan])}
    with pytest.raises(DivergedError, match=r"agent 0 at step 6 has diverged: actor\.0\.bias is not finite"):
        bench.train()
    assert bench.journal.checkpoints == []
    assert [record["step"] for record in bench.journal.records] == [6]


@pytest.mark.parametrize(("good_steps", "line"), [(0, 0), (3, 3)])
def test_the_restarts_before_an_environment_is_given_up_are_counted(good_steps, line):
    steps = []

    class Fails(PointGoal):
        def step(self, action):
            steps.append(action)
            if len(steps) > good_steps:
                raise RuntimeError("broke")
            return super().step(action)

    bench = Bench(RestartableEnv(Fails, Watch("agent 0"), max_restarts=2, pause=lambda _: None))
    with pytest.raises(EnvironmentFailedError):
        bench.train()
    assert [(each["step"], each["env_restarts"]) for each in bench.journal.records] == [(line, {"step": 2})]
    assert bench.metric("explorer_env_restarts_total", reason="step") == 2
    assert [step for step, *_ in bench.journal.checkpoints] == [line]


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
    env = worlds.Clock()
    bench = Bench(env)
    bench.make_evaluated = worlds.Clock
    bench.train()
    assert env.closed == 0


# -- what is measured ---------------------------------------------------------------------------------


@pytest.mark.parametrize("collectors", [[0] * BATCH, [0, 1] * 4, [1] * BATCH])
@pytest.mark.parametrize("steps", [1, DIAGNOSE_EVERY + 2])
def test_a_record_has_every_key_and_no_number_that_json_cannot_hold(collectors, steps):
    bench = Bench(collectors=collectors, train__steps=steps)
    bench.agent.losses["q_mean"] = float("nan")
    bench.train()
    (record,) = bench.journal.records
    assert set(record) == RECORD_KEYS
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["q_mean"] is None


def test_records_cover_the_time_since_the_one_before():
    bench = Bench(worlds.Clock(), train__steps=40, train__log_every=20)
    bench.make_evaluated = worlds.Clock
    bench.train()
    first, second = bench.journal.records
    assert (first["step"], second["step"]) == (20, 40)
    assert (first["episodes"], second["episodes"]) == (2, 2)
    assert first["episode_return"] == second["episode_return"] == 10
    assert (first["updates"], second["updates"]) == (19, 39)
    assert second["updates_per_second"] == second["steps_per_second"] > first["updates_per_second"] > 0
    assert second["buffer_size"] == 1_000


def test_the_size_of_the_buffer_is_not_known_before_the_first_batch():
    bench = Bench(train__steps=6, train__log_every=3, agent__start_steps=5)
    bench.train()
    assert [record["buffer_size"] for record in bench.journal.records] == [None, 1_000]


def test_losses_and_similarity_are_looked_at_every_fiftieth_update():
    bench = Bench(collectors=[0, 0, 1, 1, 1, 2, 2, 2], agents=4, train__steps=DIAGNOSE_EVERY + 1)
    learner = bench.train()
    (record,) = bench.journal.records
    assert (record["critic_loss"], record["actor_loss"], record["q_mean"]) == (2.0, -1.0, 3.0)
    assert set(record["similarity"]) == {"0", "1", "2"}
    assert record["similarity"]["0"] == 1.0
    assert all(0 <= record["similarity"][source] < 1 for source in "12")
    assert 0 < record["similarity_weight"] < 1
    assert 0 < record["external_share"] < 1
    weight = bench.agent.weights[-1].double()
    assert record["external_share"] == pytest.approx(float(weight[2:].sum() / weight.sum()))
    assert record["effective_batch"] == pytest.approx(float(weight.sum()))
    for term in ("covariance", "mean"):
        assert set(record[f"divergence_{term}_by_source"]) == {"0", "1", "2"}
        assert record[f"divergence_{term}_by_source"]["0"] == 0.0
    assert set(learner.progress.similarity) == {0, 1, 2}


def test_progress_and_metrics_show_the_weight_that_all_external_rows_have_together():
    bench = Bench(collectors=[0, 0, 1, 1, 1, 2, 2, 2], agents=3, train__steps=DIAGNOSE_EVERY + 1)
    learner = bench.train()
    weight = float(bench.agent.weights[-1][-1])
    assert learner.progress.similarity_weight == pytest.approx(weight)
    assert bench.metric("similarity_pooled_weight_ratio") == pytest.approx(weight)
    assert weight not in [pytest.approx(learner.progress.similarity[source]) for source in (1, 2)]


def test_a_lone_agent_has_no_similarity_weight():
    assert Bench(agents=1, train__steps=DIAGNOSE_EVERY + 1).train().progress.similarity_weight is None


def test_the_policy_lag_is_the_mean_age_in_updates_of_the_own_rows():
    bench = Bench(train__steps=DIAGNOSE_EVERY + 1)
    bench.source.versions = 20
    bench.train()
    assert bench.journal.records[-1]["policy_lag"] == DIAGNOSE_EVERY - 20


def test_metrics_show_what_was_done():
    bench = Bench(worlds.Clock(), collectors=[0, 1] * 4, train__steps=DIAGNOSE_EVERY + 1)
    bench.make_evaluated = worlds.Clock
    learner = bench.train()
    assert bench.metric("explorer_env_steps_total") == DIAGNOSE_EVERY + 1
    assert bench.metric("explorer_episodes_total") == 5
    assert bench.metric("explorer_episode_return") == 10
    assert bench.metric("learner_updates_total") == DIAGNOSE_EVERY
    assert bench.metric("learner_update_duration_seconds_count", stage="update") == DIAGNOSE_EVERY
    assert bench.metric("learner_update_duration_seconds_sum", stage="sample") == DIAGNOSE_EVERY
    assert bench.metric("learner_loss", loss="critic_loss") == 2.0
    assert bench.metric("evaluation_return_mean") == 3.0
    assert bench.metric("evaluation_duration_seconds_count") == 2
    shown = bench.metric("similarity_weight_ratio", source_agent_id="1")
    assert shown == pytest.approx(learner.progress.similarity[1])
    assert bench.metric("similarity_divergence_nats", term="covariance") > 0
    assert 0 < bench.metric("similarity_external_share_ratio") < 0.5
    assert BATCH / 2 < bench.metric("similarity_effective_batch_transitions") < BATCH
    # with one peer, its terms are those of all external rows
    for term in ("covariance", "mean"):
        alone = bench.metric("similarity_source_divergence_nats", source_agent_id="1", term=term)
        assert alone == pytest.approx(bench.metric("similarity_divergence_nats", term=term))


def test_a_single_agent_shows_no_divergence():
    bench = Bench(agents=1, train__steps=DIAGNOSE_EVERY + 1)
    bench.train()
    assert bench.metric("similarity_effective_batch_transitions") == BATCH
    assert bench.metric("similarity_external_share_ratio") == 0
    assert bench.metric("similarity_divergence_nats", term="covariance") is None
    assert bench.journal.records[-1]["divergence_covariance"] is None


# -- progress -----------------------------------------------------------------------------------------


def test_progress_says_where_training_stands():
    bench = Bench(worlds.Clock(), train__steps=20, eval__every=10, agent__start_steps=12)
    bench.make_evaluated = worlds.Clock
    learner = bench.learner()
    assert (learner.progress.state, learner.progress.total_steps) == ("starting", 20)
    learner.begin(threading.Event())
    assert (learner.progress.state, learner.progress.first_evaluation_return) == ("exploring", 3.0)
    for _ in range(10):
        learner.step()
    assert (learner.progress.state, learner.progress.step, learner.progress.updates) == ("exploring", 10, 0)
    assert learner.progress.episode_return == 10
    for _ in range(10):
        learner.step()
    assert (learner.progress.state, learner.progress.step, learner.progress.updates) == ("training", 20, 9)
    assert learner.done
    learner.finish()
    assert learner.progress.state == "finished"
    assert learner.progress.first_evaluation_return == learner.progress.evaluation_return == 3.0


def test_the_pace_is_that_of_the_latest_updates_without_random_steps_and_evaluations():
    bench = Bench(train__steps=3 * DIAGNOSE_EVERY, eval__every=DIAGNOSE_EVERY // 2, agent__start_steps=20)
    learner = bench.learner()
    learner.begin(threading.Event())
    paces = []
    while not learner.done:
        learner.step()
        paces.append(learner.progress.updates_per_second)
    first = 20 + DIAGNOSE_EVERY - 2
    assert set(paces[:first]) == {0.0}
    ticks_per_update = 5  # the clock is read so often, and goes on by a second each time
    assert paces[first] == pytest.approx(DIAGNOSE_EVERY / (DIAGNOSE_EVERY * ticks_per_update), rel=0.1)
    assert paces[-1] == pytest.approx(paces[first], rel=0.1)


def test_the_first_refusal_of_each_kind_is_said_with_a_remedy(caplog):
    bench = Bench(worlds.NanReward(), train__steps=12)
    bench.make_evaluated = worlds.NanReward
    bench.train()
    warned = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    (warning,) = warned
    assert_one_sentence(warning, "agent 0 at step 3", "reward", "not finite", "make the environment return")


def test_progress_leaves_out_returns_that_are_not_finite():
    bench = Bench(worlds.NanReward(), train__steps=12)
    bench.make_evaluated = partial(make_env, "worlds:NanReward", {})
    progress = bench.train().progress
    assert progress.episode_return is None
    assert progress.evaluation_return is None


def test_progress_can_be_read_while_another_thread_trains():
    bench = Bench(agent__start_steps=3)
    waiting, go_on = threading.Event(), threading.Event()
    batch = bench.source.next()

    def blocking():
        waiting.set()
        assert go_on.wait(PATIENCE_S)
        return batch

    bench.source.next = blocking
    learner = bench.learner()
    thread = threading.Thread(target=learner.train, args=(threading.Event(),))
    thread.start()
    try:
        assert waiting.wait(PATIENCE_S)
        assert learner.progress.first_evaluation_return is not None
        assert learner.progress.state == "exploring"
    finally:
        go_on.set()
        thread.join(PATIENCE_S)
    assert (learner.progress.step, learner.progress.updates) == (6, 4)


# -- going on from a saved state ----------------------------------------------------------------------


@dataclass
class ResumableAgent(StubAgent):
    """A StubAgent that takes its number of updates back."""

    def load_state_dict(self, state):
        self.updates = int(state["updates"])


def stopped_after(steps: int, **settings) -> tuple[Bench, Saved]:
    """What a learner keeps that is stopped after so many steps."""
    bench, halt, kept = Bench(**settings), threading.Event(), []
    store = bench.sink.store

    def stop(row):
        store(row)
        if len(bench.sink.rows) == steps:
            halt.set()

    bench.sink.store = stop
    bench.journal.checkpoint = lambda *, step, saved, scores: kept.append(saved)
    bench.learner().train(halt)
    return bench, kept[-1]


def resumed_from(saved: Saved, *, buffer_is_empty: bool = False, elapsed_s: float = 0.0, **settings) -> Bench:
    bench = Bench(**settings)
    bench.agent = ResumableAgent(bench.events)
    learner = bench.learner()
    learner.resume(saved, elapsed_s=elapsed_s)
    if buffer_is_empty:
        learner.refill()
    learner.train(threading.Event())
    return bench


LONGER = {"train__steps": 12, "eval__every": 4, "train__log_every": 5}


def test_a_resumed_learner_does_the_rest_and_nothing_twice():
    first, saved = stopped_after(6, **LONGER)
    rest = resumed_from(saved, **LONGER)
    assert first.events[-1] == "metrics at 6"
    assert [event for event in rest.events if " at " in event] == [
        "evaluation at 8",
        "metrics at 10",
        "evaluation at 12",
        "metrics at 12",
        "checkpoint at 12",
    ]
    assert rest.agent.updates == 11
    assert [record["updates"] for record in rest.journal.records] == [9, 11]


def test_training_time_goes_on():
    _, saved = stopped_after(6, **LONGER)
    rest = resumed_from(saved, elapsed_s=1000.0, **LONGER)
    assert all(1000 < each["wall_seconds"] < 1100 for each in rest.journal.evaluations)
    assert all(1000 < each["wall_seconds"] < 1100 for each in rest.journal.records)


def test_with_an_empty_buffer_a_resumed_learner_stores_its_first_transitions_anew_before_it_updates():
    settings = {**LONGER, "agent__start_steps": 4}
    _, saved = stopped_after(6, **settings)
    rest = resumed_from(saved, buffer_is_empty=True, **settings)
    assert [event for event in rest.events if " at " not in event] == (
        ["store"] * 4 + ["batch", "update"] + ["store", "batch", "update"] * 2
    )
    full = resumed_from(saved, **settings)
    assert [event for event in full.events if " at " not in event] == ["store", "batch", "update"] * 6


@pytest.mark.parametrize("during", ["store", "batch"])
def test_a_learner_whose_buffer_is_lost_stores_its_first_transitions_anew_before_it_updates(during):
    bench = Bench(**LONGER, agent__start_steps=3)
    learner = bench.learner()
    calls = {"store": (bench.sink, "store"), "batch": (bench.source, "next")}
    place, name = calls[during]
    once = getattr(place, name)

    def lost(*arguments):
        if learner.steps == 5:
            learner.refill()
        return once(*arguments)

    setattr(place, name, lost)
    learner.train(threading.Event())
    whole, left_out = ["store", "batch", "update"], {"store": ["store"], "batch": ["store", "batch"]}[during]
    assert [event for event in bench.events if " at " not in event] == (
        ["store"] * 2 + whole * 2 + left_out + ["store"] * 2 + whole * 5
    )


def test_where_the_environment_fails_before_a_learner_has_gone_on_its_checkpoint_stays():
    _, saved = stopped_after(6, **LONGER)
    bench = Bench(**LONGER)

    def replayed():
        raise EnvironmentFailedError("the environment raised")

    bench.agent = ResumableAgent(bench.events)
    learner = bench.learner()
    learner.parts.explorer.replay = replayed
    learner.resume(saved, elapsed_s=0.0)
    with pytest.raises(EnvironmentFailedError):
        learner.train(threading.Event())
    assert bench.events == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda numbers: numbers.pop("counters"),
        lambda numbers: numbers["window"].pop("losses"),
        lambda numbers: numbers["exploration"].update(generator={"state": {"state": "x"}}),
        lambda numbers: numbers.update(counters=None),
    ],
)
def test_a_state_that_is_none_is_refused_in_one_sentence(damage):
    _, saved = stopped_after(6, **LONGER)
    numbers = json.loads(json.dumps(saved.numbers))
    damage(numbers)
    with pytest.raises(RunDirectoryError) as refusal:
        resumed_from(replace(saved, numbers=numbers), **LONGER)
    assert_one_sentence(refusal.value, "the checkpoint of agent 0 cannot be gone on from")
