import math

import pytest
import torch

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.similarity.weigher import SimilarityWeigher, Weighing
from dase_grpc.learning.training.statistics import DeviceTotals, Diagnosis, Mean, Window, fold, record, show
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.metrics.nodes import LearnerMetrics
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
    return SimilarityWeigher(DpsConfig(divergence=divergence), own_id=0, agents=3)


def weighing(*collectors: int, divergence: str = "jeffreys"):
    return weigher(divergence).weigh(batch(*collectors), torch.zeros(len(collectors), 1))


def sources(*collectors: int):
    return weigher().by_source(batch(*collectors), torch.zeros(len(collectors), 1))


def window_record(window: Window, totals: DeviceTotals | None = None, **changes):
    values = {"step": 10, "updates": 5, "now": 4.0, "wall_seconds": 4.0, **changes}
    return record(window, totals=totals or DeviceTotals.zero(CPU), **values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_mean_leaves_out_what_is_not_finite(bad):
    mean = Mean()
    assert mean.value is None
    for value in (1.0, bad, 3.0):
        mean.add(value)
    assert (mean.value, mean.count) == (2.0, 2)


def test_totals_are_the_mean_similarity_over_batches_with_external_rows():
    totals = DeviceTotals.zero(CPU)
    given = [weighing(0, 1, 1, 1), weighing(0, 0, 0, 0), weighing(0, 1, 1, 1, divergence="none")]
    for each in given:
        totals.add(each)
    similarity, degenerate = totals.take()
    assert similarity == pytest.approx((float(given[0].similarity) + 1.0) / 2)
    assert degenerate == 0


def test_totals_count_batches_that_could_not_be_measured_and_start_afresh_once_taken():
    totals = DeviceTotals.zero(CPU)
    for each in (weighing(0, 0, 0, 1), weighing(0, 1, 1, 1)):
        totals.add(each)
    assert totals.take()[1] == 1
    assert totals.take() == (None, 0)


def test_a_diagnosis_names_the_agents_in_the_batch_only():
    seen = Diagnosis.read(
        {"critic_loss": torch.tensor(2.0)}, weighing(0, 2, 2, 2), sources(0, 2, 2, 2), batch_size=4
    )
    assert seen.losses == {"critic_loss": 2.0}
    assert set(seen.similarity) == {0, 2}
    assert set(seen.terms) == {"covariance", "mean"}


def test_a_diagnosis_leaves_out_agents_whose_similarity_cannot_be_measured():
    weighed = weighing(0, 1, 2, 2, 2)
    seen = Diagnosis.read({}, weighed, sources(0, 1, 2, 2, 2), batch_size=5)
    assert set(seen.similarity) == {0, 2}
    assert seen.similarity_weight == pytest.approx(float(weighed.similarity))


def test_the_external_share_is_the_part_of_the_loss_weights_that_others_have():
    weighed = weighing(0, 1, 1, 1)
    seen = Diagnosis.read({}, weighed, sources(0, 1, 1, 1), batch_size=4)
    similarity = float(weighed.similarity)
    assert seen.external_share == pytest.approx(3 * similarity / (1 + 3 * similarity))


def weighed_by(*weights: float, external: int) -> Weighing:
    """A weighing of which only the weights matter; the external rows come last."""
    values = torch.tensor(weights)
    similarity = values[len(weights) - external :].double().mean() if external else torch.tensor(0.0)
    unused = torch.tensor(0.0)
    return Weighing(similarity, unused, unused, unused, torch.tensor(external), torch.tensor(False), values)


@pytest.mark.parametrize(
    ("weights", "external", "share", "effective"),
    [
        ((1, 1, 1, 1), 0, 0.0, 4.0),
        ((1, 1, 0.5, 0.5), 2, 1 / 3, 3.0),
        ((1, 1, 0.25, 0.75), 2, 1 / 3, 3.0),
        ((1, 1, 0, 0), 2, 0.0, 2.0),
        ((1, 1, 1, 1), 3, 0.75, 4.0),
        ((0.25, 0.25, 0.25, 0.25), 4, 1.0, 4.0),
        ((0.5, 0.25, 0.25, 0.0), 4, 1.0, 2.0),
        ((0, 0), 2, 0.0, 0.0),
    ],
)
def test_share_and_effective_batch_are_those_of_the_weights(weights, external, share, effective):
    weighed = weighed_by(*map(float, weights), external=external)
    assert float(weighed.external_share) == share
    assert float(weighed.effective_batch) == effective
    assert weighed.external_share.dtype == weighed.effective_batch.dtype == torch.float64


def test_share_and_effective_batch_do_not_wait_for_the_device(monkeypatch):
    weighed = weighed_by(1.0, 0.5, external=1)
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("read a tensor's value"))
    assert (weighed.external_share.shape, weighed.effective_batch.shape) == ((), ())


def test_a_diagnosis_has_the_terms_of_each_source():
    found = sources(0, 1, 2, 2, 2)
    seen = Diagnosis.read({}, weighing(0, 1, 2, 2, 2), found, batch_size=5)
    assert seen.source_terms == {
        "covariance": {0: 0.0, 2: float(found.covariance_term[2])},
        "mean": {0: 0.0, 2: float(found.mean_term[2])},
    }
    assert float(found.covariance_term[2] + found.mean_term[2]) == pytest.approx(float(found.rho[2]))


def test_gauges_keep_the_last_terms_that_could_be_measured():
    registry = make_registry()
    metrics = LearnerMetrics(registry, 0)

    def shown(name: str, **labels: str):
        return registry.get_sample_value(
            f"dase_similarity_{name}_nats", {"agent_id": "0", "term": "mean", **labels}
        )

    def terms(nats: float) -> Diagnosis:
        return Diagnosis({}, {}, {"mean": nats}, 0.5, 8.0, source_terms={"mean": {1: nats}})

    for nats, wanted in ((math.inf, None), (0.25, 0.25), (math.inf, 0.25)):
        show(metrics, terms(nats))
        assert shown("divergence") == shown("source_divergence", source_agent_id="1") == wanted


def test_a_diagnosis_of_an_internal_batch_has_losses_only():
    seen = Diagnosis.read({"q_mean": torch.tensor(1.0)}, None, None, batch_size=9)
    assert seen == Diagnosis({"q_mean": 1.0}, {}, {}, external_share=0.0, effective_batch=9.0)


def test_a_record_has_rates_since_the_window_began_and_over_no_time_divides_by_no_zero():
    values = window_record(Window(started_at=2.0, started_step=4, started_updates=1))
    assert (values["steps_per_second"], values["updates_per_second"]) == (3.0, 2.0)
    assert math.isfinite(window_record(Window(4.0, 0, 0))["steps_per_second"])


def test_a_record_means_over_what_was_folded_in():
    window = Window(0.0, 0, 0)
    for critic, weight in ((1.0, 0.25), (3.0, 0.75)):
        fold(
            window,
            Diagnosis(
                {"critic_loss": critic},
                {1: weight},
                {"mean": critic},
                weight,
                8 * weight,
                None,
                {"mean": {2: critic, 1: math.inf}},
            ),
        )
    values = window_record(window)
    assert values["critic_loss"] == 2.0
    assert values["similarity"] == {"1": 0.5}
    assert (values["divergence_mean"], values["divergence_covariance"]) == (2.0, None)
    assert values["external_share"] == 0.5
    assert values["effective_batch"] == 4.0
    assert values["divergence_mean_by_source"] == {"1": None, "2": 2.0}
    assert values["divergence_covariance_by_source"] == {}
    assert values["actor_loss"] is None
