"""A run in one process whose agents draw by priorities: weights, TD errors, and what is written of it."""

import numpy as np
import pytest
import torch
from launch.resuming import assert_equal, config, records, resume, train, train_until

from dase_grpc.learning.agents.policy import Normaliser
from dase_grpc.learning.training.updates import Updates, importance
from dase_grpc.replay.buffer.priorities import Priorities

SETTINGS = {"replay__sampling": "prioritised", "priorities__beta": 0.4, "train__log_every": 60}


def test_importance_is_the_likelihood_to_the_minus_beta_over_the_largest():
    likelihood = np.array([0.25, 1.0, 4.0], np.float32)
    assert importance(likelihood, 0.5) == pytest.approx([1.0, 0.5, 0.25])
    assert importance(likelihood, 0.0).tolist() == [1.0, 1.0, 1.0]
    assert importance(likelihood, 1.0) == pytest.approx([1.0, 0.25, 0.0625])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "stack"])
def test_every_batchs_errors_are_told_and_weights_follow_beta_over_the_run(tmp_path, monkeypatch, mode):
    told, betas = [], []
    put, beta = Priorities.put, Updates._beta.fget

    def noted(self, numbers, errors):
        told.append(errors)
        put(self, numbers, errors)

    def seen(self):
        betas.append((self._at.steps, beta(self)))
        return betas[-1][1]

    monkeypatch.setattr(Priorities, "put", noted)
    monkeypatch.setattr(Updates, "_beta", property(seen))
    directory = train(tmp_path, config(**SETTINGS), mode=mode)
    assert betas[0] == (20, pytest.approx(0.4 + 0.6 * 20 / 120))
    assert betas[-1] == (120, pytest.approx(1.0))
    assert len(told) == len(betas)
    assert all(len(errors) == 32 and np.isfinite(errors).all() for errors in told)
    assert any(errors.any() for errors in told)
    last = records(directory.agent(0))[-1]
    assert 0 < last["own_share"] < 1
    assert 0 < last["effective_sample_size"] < 32
    assert last["largest_priority"] >= last["mean_priority"] > 0
    assert last["priorities_ignored"] == 0


@pytest.mark.slow
def test_a_run_is_the_same_each_time(tmp_path):
    runs = [train(tmp_path, config(**SETTINGS, replay__own_share=0.25), name) for name in ("one", "two")]
    assert_equal(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "stack"])
def test_rows_that_weigh_nothing_do_not_stay_the_likeliest(tmp_path, mode):
    """Else an agent that shares nothing would draw others' new transitions again and again."""
    directory = train(tmp_path, config(**SETTINGS, dps__divergence="isolated"), mode=mode)
    shares = [record["own_share"] for record in records(directory.agent(0)) if record["own_share"]]
    assert shares[-1] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "stack"])
def test_losses_are_weighed_by_importance(tmp_path, monkeypatch, mode):
    """A weight that is the same for every row changes nothing, and one that is not does."""

    def run(name, weights):
        monkeypatch.setattr("dase_grpc.learning.training.updates.importance", weights)
        agent = train(tmp_path, config(**SETTINGS, dps__divergence="none"), name, mode=mode).agent(0)
        return [record["critic_loss"] for record in records(agent) if record["critic_loss"]]

    def of_first(likelihood, beta):
        return np.r_[1.0, np.full(len(likelihood) - 1, 1e-3)].astype(np.float32)

    ones = run("ones", lambda likelihood, beta: np.ones_like(likelihood))
    assert ones
    assert ones == pytest.approx(
        run("halves", lambda likelihood, beta: np.full_like(likelihood, 0.5)), rel=1e-3
    )
    assert ones != pytest.approx(run("first", of_first), rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("final", "told"), [(1.0, True), (0.4, False)])
def test_a_larger_total_is_told_to_change_beta_where_it_does(tmp_path, capsys, final, told):
    directory = train_until(tmp_path, config(**SETTINGS, priorities__beta_final=final), 60)
    resume(directory, steps=130)
    assert ("β of the priorities grows until the last step" in capsys.readouterr().out) == told


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "stack"])
def test_the_normaliser_learns_from_what_the_losses_count(tmp_path, monkeypatch, mode):
    """Rows corrected for how likely they were, so that its moments approach those of uniform draws."""
    weights, learn = [], Normaliser.learn

    def noted(self, observation, weight, **options):
        weights.append(weight.flatten().tolist())
        learn(self, observation, weight, **options)

    monkeypatch.setattr(Normaliser, "learn", noted)
    settings = {**SETTINGS, "agent__normalise_observations": True, "dps__divergence": "none"}
    train(tmp_path, config(**settings), mode=mode)
    assert all(max(each) == 1 for each in weights)
    assert any(min(each) < 1 for each in weights), "nothing but the correction weighs here"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "stack"])
def test_an_update_is_left_out_where_similarity_and_importance_vanish_together_only(
    tmp_path, monkeypatch, mode
):
    """Each is above 0 and their product is none in float32; weights that sum to 0 would leave NaN behind."""
    faint = "dase_grpc.learning.similarity.weigher.row_weights"
    monkeypatch.setattr(faint, lambda external, similarity: torch.where(external, np.float32(1e-38), 1.0))
    smaller = "dase_grpc.learning.training.updates.importance"
    monkeypatch.setattr(smaller, lambda likelihood, beta: np.full_like(likelihood, 1e-8))
    settings = {**SETTINGS, "replay__own_share": 0.0, "dps__scope": "transition"}
    directory = train(tmp_path, config(**settings, agent__normalise_observations=True), mode=mode)
    last = records(directory.agent(1))[-1]
    assert (last["updates"], last["skipped_updates"] > 0) == (0, True)
