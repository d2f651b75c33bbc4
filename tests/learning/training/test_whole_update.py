"""Whole updates, recorded and replayed, against the same updates as they are: to the last bit.

There is no GPU here. A trace (tracing.py) keeps what a CUDA graph would keep, so what these replays get
right shows that no number is read on the host, that no state of Python's is frozen in, and that nothing is
allocated anew between two updates.
"""

from dataclasses import fields

import pytest
import torch
from learning.agent_cases import AGENTS, CONFIGS, make, tiny
from learning.td3_cases import CPU, SCHEMA, B, N, assert_same, columns
from learning.tracing import Traces

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.graphs import REHEARSALS, Captured
from dase_grpc.learning.similarity.weigher import SimilarityWeigher
from dase_grpc.learning.training.statistics import DeviceTotals
from dase_grpc.learning.training.whole import WholeUpdate

AGENTS_IN_RUN, OWN = 3, 1
DELAYED = tiny("td3", policy_delay=2)
PAPER, MEMORY = DpsConfig(), DpsConfig(scope="agent", memory=5.0, shrinkage=0.1)
CASES = {
    "td3": (DELAYED, PAPER),
    "td3 with memory": (CONFIGS["td3"], MEMORY),
    "sac normalised, with memory": (CONFIGS["sac normalised"], MEMORY),
    "ddpg normalised": (CONFIGS["ddpg"], PAPER),
}
MEASURES = {
    "per transition": DpsConfig(scope="transition", normalise=True),
    "js": DpsConfig(divergence="js", debias=True),
    "kl of each agent": DpsConfig(divergence="kl", scope="agent", shrinkage=0.1),
    "none": DpsConfig(divergence="none"),
}


class Side:
    """An agent with its weigher and totals."""

    def __init__(self, config, options):
        self.agent = make(config, autograd=True)
        self.weigher = SimilarityWeigher(options, own_id=OWN, agents=AGENTS_IN_RUN, masked=True)
        self.totals = DeviceTotals.zero(CPU)

    def update(self, batch, *, external):
        if not external:
            return None, self.agent.update(batch, torch.ones(B))
        weighing = self.weigher.weigh(batch, self.agent.policy_actions(batch.observation))
        self.totals.add(weighing)
        return weighing, self.agent.update(batch, weighing.weight)

    def recorded(self, batch, recorder):
        return WholeUpdate(self.agent, self.weigher, self.totals, batch, recorder=recorder, name="the update")

    def state(self):
        parts = {
            "agent": self.agent.state_dict(),
            "weigher": self.weigher.tensors(),
            "totals": self.totals.tensors(),
        }
        return {f"{part}.{name}": tensor for part, held in parts.items() for name, tensor in held.items()}


def fill(rows, step):
    """New data in the same place; every third batch is the agent's own. Returns whether it is not."""
    data = columns(step)
    for name, values in data.items():
        part = torch.from_numpy(values).float()
        rows[:, SCHEMA.columns[name]] = part[:, None] if part.ndim == 1 else part
    external = step % 3 != 0
    drawn = torch.randint(
        0, AGENTS_IN_RUN, (B,), generator=torch.Generator().manual_seed(step), dtype=torch.int32
    )
    drawn[0] = OWN
    SCHEMA.agent_ids(rows.numpy())[:] = drawn.numpy() if external else OWN
    return external


def assert_equal(made, expected):
    (weighing, losses), (expected_weighing, expected_losses) = made, expected
    assert_same(losses, expected_losses)
    assert (weighing is None) == (expected_weighing is None)
    if weighing is not None:
        for field in fields(weighing):
            assert torch.equal(getattr(weighing, field.name), getattr(expected_weighing, field.name)), (
                field.name
            )


def compare(config, options, *, updates):
    recorded, plain, traces = Side(config, options), Side(config, options), Traces()
    rows = torch.zeros(B, SCHEMA.width)
    batch = Batch.from_rows(SCHEMA, rows)
    update = recorded.recorded(batch, traces)
    for step in range(updates):
        external = fill(rows, step)
        assert_equal(update(external=external), plain.update(batch, external=external))
    assert_same(recorded.state(), plain.state())
    assert recorded.agent.take_steps() == plain.agent.take_steps()
    return traces


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_replayed_updates_are_those_made_as_they_are_to_the_last_bit(case):
    config, options = CASES[case]
    kinds = 4 if case == "td3" else 2
    traces = compare(config, options, updates=kinds * (REHEARSALS + 1) * 2)
    assert len(traces.recorded) == kinds


@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_of_similarity_can_be_recorded(measure):
    weigher = Side(DELAYED, MEASURES[measure]).weigher
    rows, actions = torch.zeros(B, SCHEMA.width), torch.zeros(B, N)
    batch, traces = Batch.from_rows(SCHEMA, rows), Traces()
    weigh = Captured(lambda: weigher.weigh(batch, actions), traces, name="weighing")
    for step in range(1, REHEARSALS + 4):
        fill(rows, step)
        actions.copy_(batch.action * 0.9)
        made, expected = weigh(), weigher.weigh(batch, actions)
        for field in fields(made):
            assert torch.equal(getattr(made, field.name), getattr(expected, field.name)), field.name
    assert len(traces.recorded) == 1


def test_a_batch_without_external_rows_neither_weighs_nor_ages_the_memory():
    side = Side(DELAYED, MEMORY)
    rows = torch.zeros(B, SCHEMA.width)
    update = side.recorded(Batch.from_rows(SCHEMA, rows), Traces())
    for step in (1, 2):
        fill(rows, step)
        update(external=True)
    before = {name: tensor.clone() for name, tensor in side.weigher.tensors().items()}
    for _ in range(REHEARSALS + 3):
        weighing, _ = update(external=False)
        assert weighing is None
    assert_same(side.weigher.tensors(), before)


@pytest.mark.slow
def test_a_recorded_agent_goes_on_bit_for_bit_after_a_load_and_so_does_one_made_from_its_state():
    config, rows = CONFIGS["sac"], torch.zeros(B, SCHEMA.width)
    recorded, plain = Side(config, PAPER), Side(config, PAPER)
    batch = Batch.from_rows(SCHEMA, rows)
    update = recorded.recorded(batch, Traces())
    start = plain.agent.state_dict()
    for step in range(20):
        if step == 14:
            for side in (recorded, plain):
                side.agent.load_state_dict(start)
        external = fill(rows, step)
        assert_equal(update(external=external), plain.update(batch, external=external))
    resumed = make(config, seed=5, autograd=True)
    resumed.load_state_dict(recorded.agent.state_dict())
    recorded.agent = resumed
    external = fill(rows, 20)
    assert_equal(recorded.update(batch, external=external), plain.update(batch, external=external))


# On another device than the CPU


@pytest.fixture
def nowhere(monkeypatch):
    """A device of shapes without numbers: who asks for one fails, and so does who mixes devices."""
    kernels = torch.library.Library("aten", "IMPL", "Meta")
    for name in ("_fused_adam_", "_amp_foreach_non_finite_check_and_unscale_"):  # torch has none
        kernels.impl(name, lambda *_, **__: None)
    place = "dase_grpc.learning.agents.equations.NoiseStream"
    monkeypatch.setattr(f"{place}.__init__", lambda *_: None)
    monkeypatch.setattr(f"{place}.fill", lambda _, tensor, std: tensor.normal_(0, std))
    yield torch.device("meta")
    kernels._destroy()


@pytest.mark.parametrize("case", CASES)
def test_an_update_stays_on_its_device_and_reads_nothing_of_it(case, nowhere):
    config, options = CASES[case]
    agent = AGENTS[config.algorithm](config, SCHEMA, seed=0, agent_id=OWN, device=nowhere)
    batch = Batch.from_rows(SCHEMA, torch.empty(B, SCHEMA.width, device=nowhere))
    weigher = SimilarityWeigher(options, own_id=OWN, agents=AGENTS_IN_RUN)
    totals = DeviceTotals.zero(nowhere)
    update = WholeUpdate(agent, weigher, totals, batch, recorder=None, name="the update")
    for external in (True, False, True, False):
        weighing, losses = update(external=external)
        assert {value.device for value in losses.values()} == {nowhere}
        assert weighing is None or {getattr(weighing, field.name).device for field in fields(weighing)} == {
            nowhere
        }
