"""Updates of a stack with DPS against learners that weigh and update each by itself, and recorded ones.

There is no GPU here. A trace (tracing.py) keeps what a CUDA graph would keep, so what these replays get right
shows that no number is read on the host, no state of Python's is frozen in, and nothing is allocated anew.
"""

from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learning.agent_cases import AGENTS, CONFIGS, tiny
from learning.td3_cases import CPU, SCHEMA, B, N
from learning.tracing import Traces, products_are_the_same

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.config.sections import ReplayConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.graphs import REHEARSALS, Captured
from dase_grpc.learning.agents.memory import StackedMemory
from dase_grpc.learning.similarity.weigher import SimilarityWeigher
from dase_grpc.learning.training.statistics import DeviceTotals
from dase_grpc.learning.training.together import StackedUpdate, Taken

K = 3
SLOW = {"actor_lr": 1e-4, "critic_lr": 1e-4}
DELAYED = tiny("td3", policy_delay=2)
PAPER, MEMORY = DpsConfig(), DpsConfig(scope="agent", memory=5.0, shrinkage=0.1)
OPTIONS = {
    "default": PAPER,
    "by agent, remembered": DpsConfig(scope="agent", memory=5.0, floor=True),
    "pooled, remembered": DpsConfig(memory=5.0, shrinkage=0.5),
    "by transition": DpsConfig(scope="transition", normalise=True),
    "js": DpsConfig(divergence="js", shrinkage=0.3),
    "none": DpsConfig(divergence="none"),
}
ALONE = {
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


class Case:
    """A stack of the agents `ids` and as many by themselves, each with a masked weigher and totals.

    What they are to have in common is equal to the bit where `exact`, and the others learn by autograd then;
    but nearly equal on a processor whose batched products are not those of one by one.
    """

    def __init__(
        self, config=CONFIGS["td3"], options=PAPER, recorder=None, *, ids=range(K), exact=False, device=CPU
    ):
        self.ids, self.memory = ids, StackedMemory(len(ids))
        self.exact = exact
        self.make = partial(AGENTS[config.algorithm], config, SCHEMA, seed=1)
        run = SimpleNamespace(agent=config, train=SimpleNamespace(agents=K), replay=ReplayConfig())
        rows = [self.memory.of(place) for place in range(len(ids))]
        self.totals = [DeviceTotals.zero(device, memory=row) for row in rows]
        parts = [
            SimpleNamespace(
                agent=self.make(agent_id=k, device=device, memory=row),
                weigher=SimilarityWeigher(options, own_id=k, agents=K, memory=row),
                agent_id=k,
                schema=SCHEMA,
                device=device,
                config=run,
            )
            for k, row in zip(ids, rows, strict=True)
        ]
        self.agents, self.weighers = [each.agent for each in parts], [each.weigher for each in parts]
        self.update = StackedUpdate(parts, self.memory, recorder=recorder)
        self.twins = [self.make(agent_id=k, device=CPU, autograd=exact or None) for k in ids]
        self.twin_weighers = [SimilarityWeigher(options, own_id=k, agents=K, masked=True) for k in ids]
        self.twin_totals = [DeviceTotals.zero(CPU) for _ in ids]

    def twin(self, place, taken):
        """What a learner does by itself; the weights and losses."""
        batch = Batch.from_rows(SCHEMA, torch.from_numpy(taken.rows.copy()))
        weighing, weight = None, torch.ones(B)
        if not taken.own.all():
            actions = self.twins[place].policy_actions(batch.observation)
            weighing = self.twin_weighers[place].weigh(batch, actions)
            self.twin_totals[place].add(weighing)
            weight = weighing.weight
            if not taken.own.any() and not bool(weight.any()):
                return None
        return weighing, self.twins[place].update(batch, weight), batch

    def step(self, *taken):
        """Both, compared."""
        made_for, made = self.update(taken)
        for place, each in enumerate(taken):
            expected = None if each is None else self.twin(place, each)
            assert made_for[place] == (expected is not None)
            if expected is not None:
                self.compare(place, made, expected)

    def compare(self, place, made, expected):
        weighing, losses, batch = expected
        found = self.update.see(made).of(place)
        self.compare_each(found[1], losses, rtol=1e-3, atol=1e-4)
        if weighing is None:
            return
        self.compare_each(vars(found[0]), vars(weighing), rtol=1e-2, atol=1e-5)
        actions = self.twins[place].policy_actions(batch.observation)
        sources = self.twin_weighers[place].by_source(batch, actions)
        self.compare_each(
            {"similarity": found[2].similarity, "count": found[2].count},
            {"similarity": sources.similarity, "count": sources.count},
            rtol=1e-2,
            atol=1e-5,
        )

    def compare_each(self, found, expected, *, rtol, atol):
        for name, value in expected.items():
            rtol, atol = (0, 0) if self.exact and products_are_the_same() else (rtol, atol)
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol)

    def compare_states(self):
        for place in range(len(self.ids)):
            twin = self.twins[place]
            self.compare_each(self.agents[place].state_dict(), twin.state_dict(), rtol=1e-2, atol=2e-3)
            assert self.agents[place].take_steps() == twin.take_steps()
            for ours, theirs in ((self.weighers, self.twin_weighers), (self.totals, self.twin_totals)):
                self.compare_each(ours[place].tensors(), theirs[place].tensors(), rtol=1e-2, atol=1e-4)


def take(k, seed, collectors=None):
    """A batch for agent k, of rows that the agents in `collectors` take turns to have collected."""
    rng = np.random.default_rng(1000 * k + seed)
    rows = rng.normal(size=(B, SCHEMA.width)).astype(np.float32)
    part = SCHEMA.columns
    rows[:, part["action"]] = rng.uniform(-1, 1, rows[:, part["action"]].shape)
    rows[:, part["bootstrap"]] = 1
    ids = np.resize(np.arange(K) if collectors is None else collectors, B)
    rows[:, part["agent_id"].start] = ids.astype(np.int32).view(np.float32)
    rows[:, part["policy_version"].start] = np.zeros(B, np.uint32).view(np.float32)
    return Taken(rows, ids == k)


@pytest.mark.parametrize("name", CONFIGS)
def test_updates_at_once_are_those_of_learners_by_themselves(name):
    case = Case(CONFIGS[name].model_copy(update=SLOW))
    for seed in range(4):
        case.step(*(take(k, seed) for k in range(K)))
    case.compare_states()


@pytest.mark.parametrize("options", OPTIONS)
def test_each_way_to_weigh_is_that_of_learners_by_themselves(options):
    case = Case(tiny("ddpg", **SLOW), OPTIONS[options])
    for seed in range(4):
        case.step(*(take(k, seed, [k, k, k, (k + 1) % K, (k + 2) % K]) for k in range(K)))
    case.compare_states()


def test_agents_without_a_batch_or_without_peers_rows_are_as_by_themselves():
    case = Case(tiny("td3", policy_delay=2, **SLOW), OPTIONS["by agent, remembered"])
    case.step(take(0, 1), None, take(2, 1, [2]))
    case.step(take(0, 2), take(1, 2), take(2, 2))
    case.step(None, take(1, 3, [1]), None)
    case.compare_states()
    assert [agent.updates for agent in case.agents] == [2, 2, 2]
    assert case.update([None] * K) == ([False] * K, None)


def test_a_batch_that_weighs_nothing_leaves_its_agent_and_its_noise_as_they_are():
    case = Case(options=DpsConfig(divergence="isolated"))
    case.step(take(0, 1), take(1, 1, [0, 2]), take(2, 1))
    assert [agent.updates for agent in case.agents] == [1, 0, 1]
    case.step(*(take(k, 2) for k in range(K)))
    case.compare_states()


# -- recorded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", AGENTS)
@pytest.mark.slow
def test_a_recorded_update_is_the_update_as_it_is(algorithm):
    config = tiny(algorithm, normalise_observations=True, policy_delay=2, **SLOW)
    traces = Traces()
    plain, recorded = Case(config), Case(config, recorder=traces)
    for seed in range(2 * REHEARSALS + 6):
        taken = [take(k, seed) if seed % 5 != k else None for k in range(K)]
        first, second = plain.update(taken), recorded.update(taken)
        assert first[0] == second[0]
        for name, values in first[1].losses.items():
            live = torch.tensor(first[0])
            assert torch.equal(values[live], second[1].losses[name][live])
    assert len(traces.recorded) == 2 if algorithm == "td3" else 1
    for one, other in zip(plain.agents, recorded.agents, strict=True):
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name


def mixed(step):
    """Agent 1's batch of that number; every third one is its own, and ages no memory of others'."""
    return take(1, step, None if step % 3 else [1])


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE)
def test_recorded_updates_of_a_stack_of_one_are_those_of_the_agent_to_the_last_bit(case):
    traces, kinds = Traces(), 4 if case == "td3" else 2
    alone = Case(*ALONE[case], traces, ids=[1], exact=True)
    for step in range(kinds * (REHEARSALS + 1) * 2):
        alone.step(mixed(step))
    alone.compare_states()
    assert len(traces.recorded) == kinds


@pytest.mark.slow
def test_a_recorded_agent_goes_on_bit_for_bit_after_a_load_and_so_does_one_made_from_its_state():
    alone = Case(CONFIGS["sac"], PAPER, Traces(), ids=[1], exact=True)
    start = alone.twins[0].state_dict()
    for step in range(20):
        if step == 14:
            for agent in (*alone.agents, *alone.twins):
                agent.load_state_dict(start)
        alone.step(mixed(step))
    alone.twins = [alone.make(agent_id=5, device=CPU, autograd=True)]
    alone.twins[0].load_state_dict(alone.agents[0].state_dict())
    alone.step(mixed(20))


@pytest.mark.slow
@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_of_similarity_can_be_recorded(measure):
    weigher = SimilarityWeigher(MEASURES[measure], own_id=1, agents=K, masked=True)
    rows, actions = torch.zeros(B, SCHEMA.width), torch.zeros(B, N)
    batch, traces = Batch.from_rows(SCHEMA, rows), Traces()
    weigh = Captured(lambda: weigher.weigh(batch, actions), traces, name="weighing")
    for step in range(REHEARSALS + 3):
        rows.copy_(torch.from_numpy(take(1, step).rows))
        actions.copy_(batch.action * 0.9)
        made, expected = weigh(), weigher.weigh(batch, actions)
        for field in fields(made):
            assert torch.equal(getattr(made, field.name), getattr(expected, field.name)), field.name
    assert len(traces.recorded) == 1


class Nowhere:
    """Takes the place of Staged on a device that nothing can be copied to."""

    def __init__(self, shape, dtype, device):
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    def fill(self, write):
        write(np.zeros(self.tensor.shape, np.float32))


@pytest.fixture
def nowhere(monkeypatch):
    """A device of shapes without numbers: who asks for one fails, and so does who mixes devices."""
    kernels = torch.library.Library("aten", "IMPL", "Meta")
    for name in ("_fused_adam_", "_amp_foreach_non_finite_check_and_unscale_"):  # torch has none
        kernels.impl(name, lambda *_, **__: None)
    place = "dase_grpc.learning.agents.equations.NoiseStream"
    monkeypatch.setattr(f"{place}.__init__", lambda *_: None)
    monkeypatch.setattr(f"{place}.fill", lambda _, tensor, std: tensor.normal_(0, std))
    monkeypatch.setattr("dase_grpc.learning.training.together.Staged", Nowhere)
    yield torch.device("meta")
    kernels._destroy()


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE)
def test_an_update_stays_on_its_device_and_reads_nothing_of_it(case, nowhere):
    config, options = ALONE[case]
    alone = Case(config, options, ids=[1], device=nowhere)
    for step in range(4):
        _, made = alone.update([mixed(step)])
        held = [*made.losses.values(), *([] if made.weighing is None else vars(made.weighing).values())]
        assert {value.device for value in held} == {nowhere}
