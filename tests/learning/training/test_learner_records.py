"""What a learner measures and shows."""

import json
import threading

import pytest
import worlds
from learning.training.bench import BATCH, Bench, trained
from patience import PATIENCE_S

from dase_grpc.learning.training.updates import DIAGNOSE_EVERY

LOOKED_AT = {"train__steps": DIAGNOSE_EVERY + 1}
KEYS = """
step wall_seconds updates updates_per_second steps_per_second episode_return episodes critic_loss actor_loss
q_mean skipped_updates degenerate_updates refused env_restarts similarity similarity_weight
divergence_covariance divergence_mean divergence_covariance_by_source divergence_mean_by_source external_share
effective_sample_size own_share largest_priority mean_priority priorities_ignored
effective_batch policy_lag buffer_size
"""


@pytest.mark.parametrize("collectors", [[0] * BATCH, [0, 1] * 4, [1] * BATCH])
@pytest.mark.parametrize("steps", [1, DIAGNOSE_EVERY + 2])
def test_a_record_has_every_key_and_no_number_that_json_cannot_hold(collectors, steps):
    bench = Bench(collectors=collectors, train__steps=steps)
    bench.agent.losses["q_mean"] = float("nan")
    bench.train()
    (record,) = bench.journal.records
    assert set(record) == set(KEYS.split())
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["q_mean"] is None


def test_records_cover_the_time_since_the_one_before():
    first, second = trained(worlds.Clock(), train__steps=40, train__log_every=20).journal.records
    assert (first["step"], second["step"]) == (20, 40)
    assert (first["episodes"], second["episodes"]) == (2, 2)
    assert first["episode_return"] == second["episode_return"] == 10
    assert (first["updates"], second["updates"]) == (19, 39)
    assert second["updates_per_second"] == second["steps_per_second"] > first["updates_per_second"] > 0
    assert second["buffer_size"] == 1_000


def test_the_size_of_the_buffer_is_not_known_before_the_first_batch():
    bench = trained(train__steps=6, train__log_every=3, agent__start_steps=5)
    assert [record["buffer_size"] for record in bench.journal.records] == [None, 1_000]


def test_losses_and_similarity_are_looked_at_every_fiftieth_update():
    bench = Bench(collectors=[0, 0, 1, 1, 1, 2, 2, 2], agents=4, **LOOKED_AT)
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
    bench = Bench(collectors=[0, 0, 1, 1, 1, 2, 2, 2], agents=3, **LOOKED_AT)
    progress = bench.train().progress
    weight = float(bench.agent.weights[-1][-1])
    assert progress.similarity_weight == pytest.approx(weight)
    assert bench.metric("similarity_pooled_weight_ratio") == pytest.approx(weight)
    assert weight not in [pytest.approx(progress.similarity[source]) for source in (1, 2)]


def test_a_lone_agent_shows_no_similarity_weight_and_no_divergence():
    bench = Bench(agents=1, **LOOKED_AT)
    assert bench.train().progress.similarity_weight is None
    assert bench.metric("similarity_effective_batch_transitions") == BATCH
    assert bench.metric("similarity_external_share_ratio") == 0
    assert bench.metric("similarity_divergence_nats", term="covariance") is None
    assert bench.journal.records[-1]["divergence_covariance"] is None


def test_the_policy_lag_is_the_mean_age_in_updates_of_the_own_rows():
    bench = Bench(**LOOKED_AT)
    bench.source.versions = 20
    bench.train()
    assert bench.journal.records[-1]["policy_lag"] == DIAGNOSE_EVERY - 20


def test_metrics_show_what_was_done():
    bench = Bench(worlds.Clock(), collectors=[0, 1] * 4, **LOOKED_AT)
    learner = bench.train()
    for name, labels, value in (
        ("explorer_env_steps_total", {}, DIAGNOSE_EVERY + 1),
        ("explorer_episodes_total", {}, 5),
        ("explorer_episode_return", {}, 10),
        ("learner_updates_total", {}, DIAGNOSE_EVERY),
        ("learner_update_duration_seconds_count", {"stage": "update"}, DIAGNOSE_EVERY),
        ("learner_update_duration_seconds_sum", {"stage": "sample"}, DIAGNOSE_EVERY),
        ("learner_loss", {"loss": "critic_loss"}, 2.0),
        ("evaluation_return_mean", {}, 3.0),
        ("evaluation_duration_seconds_count", {}, 2),
        ("similarity_weight_ratio", {"source_agent_id": "1"}, pytest.approx(learner.progress.similarity[1])),
    ):
        assert bench.metric(name, **labels) == value, name
    assert bench.metric("similarity_divergence_nats", term="covariance") > 0
    assert 0 < bench.metric("similarity_external_share_ratio") < 0.5
    assert BATCH / 2 < bench.metric("similarity_effective_batch_transitions") < BATCH
    # with one peer, its terms are those of all external rows
    for term in ("covariance", "mean"):
        alone = bench.metric("similarity_source_divergence_nats", source_agent_id="1", term=term)
        assert alone == pytest.approx(bench.metric("similarity_divergence_nats", term=term))


# -- progress -----------------------------------------------------------------------------------------


def test_progress_says_where_training_stands():
    learner = Bench(worlds.Clock(), train__steps=20, eval__every=10, agent__start_steps=12).learner()

    def stands():
        return learner.progress.state, learner.progress.step, learner.progress.updates

    assert (learner.progress.state, learner.progress.total_steps) == ("starting", 20)
    learner.begin(threading.Event())
    assert (learner.progress.state, learner.progress.first_evaluation_return) == ("exploring", 3.0)
    for _ in range(10):
        learner.step()
    assert stands() == ("exploring", 10, 0)
    assert learner.progress.episode_return == 10
    for _ in range(10):
        learner.step()
    assert stands() == ("training", 20, 9)
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
    assert paces[first] == pytest.approx(1 / ticks_per_update, rel=0.1)
    assert paces[-1] == pytest.approx(paces[first], rel=0.1)


def test_progress_leaves_out_returns_that_are_not_finite():
    progress = Bench(worlds.NanReward(), train__steps=12).train().progress
    assert (progress.episode_return, progress.evaluation_return) == (None, None)


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
