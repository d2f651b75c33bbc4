import math

import pytest
import torch

from dase_grpc.learning.batch import Batch
from dase_grpc.learning.dps import DpsOptions
from dase_grpc.learning.similarity import SimilarityWeigher
from dase_grpc.learning.statistics import DeviceTotals, Diagnosis, Mean, Window, fold, record
from dase_grpc.schema import TransitionSchema

SCHEMA = TransitionSchema("a world", 1, 1, (-1.0,), (1.0,))
CPU = torch.device("cpu")


def batch(*collectors: int) -> Batch:
    rows = torch.zeros(len(collectors), SCHEMA.width)
    rows[:, SCHEMA.columns["action"]] = torch.linspace(-0.5, 0.5, len(collectors))[:, None]
    rows[:, SCHEMA.columns["agent_id"]] = torch.tensor(collectors, dtype=torch.int32).view(torch.float32)[
        :, None
    ]
    return Batch.from_rows(SCHEMA, rows)


def weigher(divergence: str = "jeffreys") -> SimilarityWeigher:
    return SimilarityWeigher(DpsOptions(divergence), own_id=0, agents=3)


def weighing(*collectors: int, divergence: str = "jeffreys"):
    return weigher(divergence).weigh(batch(*collectors), torch.zeros(len(collectors), 1))


def sources(*collectors: int):
    return weigher().by_source(batch(*collectors), torch.zeros(len(collectors), 1))


def window_record(window: Window, totals: DeviceTotals | None = None, **changes):
    values = {"step": 10, "updates": 5, "now": 4.0, "wall_seconds": 4.0, **changes}
    return record(window, totals=totals or DeviceTotals(CPU), **values)


def test_a_mean_of_nothing_is_not_known():
    assert Mean().value is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_mean_leaves_out_what_is_not_finite(bad):
    mean = Mean()
    for value in (1.0, bad, 3.0):
        mean.add(value)
    assert (mean.value, mean.count) == (2.0, 2)


def test_totals_are_the_mean_similarity_over_batches_with_external_rows():
    totals = DeviceTotals(CPU)
    given = [weighing(0, 1, 1, 1), weighing(0, 0, 0, 0), weighing(0, 1, 1, 1, divergence="none")]
    for each in given:
        totals.add(each)
    similarity, degenerate = totals.take()
    assert similarity == pytest.approx((float(given[0].similarity) + 1.0) / 2)
    assert degenerate == 0


def test_totals_count_batches_that_could_not_be_measured():
    totals = DeviceTotals(CPU)
    for each in (weighing(0, 0, 0, 1), weighing(0, 1, 1, 1)):
        totals.add(each)
    assert totals.take()[1] == 1


def test_taking_totals_starts_them_afresh():
    totals = DeviceTotals(CPU)
    totals.add(weighing(0, 1, 1, 1))
    totals.take()
    assert totals.take() == (None, 0)


def test_a_diagnosis_names_the_agents_in_the_batch_only():
    seen = Diagnosis.read({"critic_loss": torch.tensor(2.0)}, weighing(0, 2, 2, 2), sources(0, 2, 2, 2))
    assert seen.losses == {"critic_loss": 2.0}
    assert set(seen.similarity) == {0, 2}
    assert set(seen.terms) == {"covariance", "mean"}


def test_a_diagnosis_leaves_out_agents_whose_similarity_cannot_be_measured():
    weighed = weighing(0, 1, 2, 2, 2)
    seen = Diagnosis.read({}, weighed, sources(0, 1, 2, 2, 2))
    assert set(seen.similarity) == {0, 2}
    assert seen.similarity_weight == pytest.approx(float(weighed.similarity))


def test_the_external_share_is_the_part_of_the_loss_weights_that_others_have():
    weighed = weighing(0, 1, 1, 1)
    seen = Diagnosis.read({}, weighed, sources(0, 1, 1, 1))
    similarity = float(weighed.similarity)
    assert seen.external_share == pytest.approx(3 * similarity / (1 + 3 * similarity))


def test_a_diagnosis_of_an_internal_batch_has_losses_only():
    seen = Diagnosis.read({"q_mean": torch.tensor(1.0)}, None, None)
    assert seen == Diagnosis({"q_mean": 1.0}, similarity={}, terms={}, external_share=0.0)


def test_a_record_has_rates_since_the_window_began():
    values = window_record(Window(started_at=2.0, started_step=4, started_updates=1))
    assert (values["steps_per_second"], values["updates_per_second"]) == (3.0, 2.0)


def test_a_record_over_no_time_divides_by_no_zero():
    assert math.isfinite(window_record(Window(4.0, 0, 0))["steps_per_second"])


def test_a_record_means_over_what_was_folded_in():
    window = Window(0.0, 0, 0)
    for critic, weight in ((1.0, 0.25), (3.0, 0.75)):
        fold(window, Diagnosis({"critic_loss": critic}, {1: weight}, {"mean": critic}, weight))
    values = window_record(window)
    assert values["critic_loss"] == 2.0
    assert values["similarity"] == {"1": 0.5}
    assert (values["divergence_mean"], values["divergence_covariance"]) == (2.0, None)
    assert values["external_share"] == 0.5
    assert values["actor_loss"] is None
