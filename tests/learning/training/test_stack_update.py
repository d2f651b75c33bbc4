"""Updates of a stack with DPS against learners that weigh and update each by itself, and recorded ones."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learning.agent_cases import AGENTS, CONFIGS, tiny
from learning.td3_cases import CPU, SCHEMA, B
from learning.tracing import Traces

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.graphs import REHEARSALS
from dase_grpc.learning.agents.memory import StackedMemory
from dase_grpc.learning.similarity.weigher import SimilarityWeigher
from dase_grpc.learning.training.statistics import DeviceTotals
from dase_grpc.learning.training.together import StackedUpdate
from dase_grpc.learning.training.updating import Taken

K = 3
OPTIONS = {
    "default": DpsConfig(),
    "by agent, remembered": DpsConfig(scope="agent", memory=5.0, floor=True),
    "pooled, remembered": DpsConfig(memory=5.0, shrinkage=0.5),
    "by transition": DpsConfig(scope="transition", normalise=True),
    "js": DpsConfig(divergence="js", shrinkage=0.3),
    "none": DpsConfig(divergence="none"),
}


class Case:
    """A stack and as many agents by themselves, each with a masked weigher and totals."""

    def __init__(self, config=CONFIGS["td3"], options=OPTIONS["default"], recorder=None):
        self.memory = StackedMemory(K)
        make = AGENTS[config.algorithm]
        run = SimpleNamespace(agent=config, train=SimpleNamespace(agents=K))
        self.agents, self.totals, parts = [], [], []
        for k in range(K):
            row = self.memory.of(k)
            agent = make(config, SCHEMA, seed=1, agent_id=k, device=CPU, memory=row)
            weigher = SimilarityWeigher(options, own_id=k, agents=K, memory=row)
            self.agents.append(agent)
            self.totals.append(DeviceTotals.zero(CPU, memory=row))
            parts.append(
                SimpleNamespace(
                    agent=agent, weigher=weigher, agent_id=k, schema=SCHEMA, device=CPU, config=run
                )
            )
        self.weighers = [each.weigher for each in parts]
        self.update = StackedUpdate(parts, self.memory, recorder=recorder)
        self.twins = [make(config, SCHEMA, seed=1, agent_id=k, device=CPU) for k in range(K)]
        self.twin_weighers = [SimilarityWeigher(options, own_id=k, agents=K, masked=True) for k in range(K)]
        self.twin_totals = [DeviceTotals.zero(CPU) for _ in range(K)]

    def twin(self, k, taken):
        """What a learner does by itself; the weights and losses."""
        batch = Batch.from_rows(SCHEMA, torch.from_numpy(taken.rows.copy()))
        weighing, weight = None, torch.ones(B)
        if not taken.own.all():
            actions = self.twins[k].policy_actions(batch.observation)
            weighing = self.twin_weighers[k].weigh(batch, actions)
            self.twin_totals[k].add(weighing)
            weight = weighing.weight
            if not taken.own.any() and not bool(weight.any()):
                return None
        return weighing, self.twins[k].update(batch, weight), batch

    def step(self, taken):
        """Both, compared."""
        made_for, made = self.update(taken)
        for k, each in enumerate(taken):
            expected = None if each is None else self.twin(k, each)
            assert made_for[k] == (expected is not None)
            if expected is not None:
                self.compare(k, made, expected)
        return made

    def compare(self, k, made, expected):
        weighing, losses, batch = expected
        found = self.update.see(made).of(k)
        for name, value in losses.items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-4)
        if weighing is None:
            return
        for name in vars(weighing):
            torch.testing.assert_close(getattr(found[0], name), getattr(weighing, name), rtol=1e-2, atol=1e-5)
        actions = self.twins[k].policy_actions(batch.observation)
        sources = self.twin_weighers[k].by_source(batch, actions)
        torch.testing.assert_close(found[2].similarity, sources.similarity, rtol=1e-2, atol=1e-5)
        assert found[2].count.tolist() == sources.count.tolist()

    def compare_states(self):
        for k in range(K):
            state, twin = self.agents[k].state_dict(), self.twins[k].state_dict()
            for name in twin:
                torch.testing.assert_close(state[name], twin[name], rtol=1e-2, atol=2e-3)
            for name, value in self.weighers[k].tensors().items():
                torch.testing.assert_close(value, self.twin_weighers[k].tensors()[name], rtol=1e-2, atol=1e-4)
            for name, value in self.totals[k].tensors().items():
                torch.testing.assert_close(value, self.twin_totals[k].tensors()[name], rtol=1e-2, atol=1e-4)


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


SLOW = {"actor_lr": 1e-4, "critic_lr": 1e-4}


@pytest.mark.parametrize("name", CONFIGS)
def test_updates_at_once_are_those_of_learners_by_themselves(name):
    case = Case(CONFIGS[name].model_copy(update=SLOW))
    for seed in range(4):
        case.step([take(k, seed) for k in range(K)])
    case.compare_states()


@pytest.mark.parametrize("options", OPTIONS)
def test_each_way_to_weigh_is_that_of_learners_by_themselves(options):
    case = Case(tiny("ddpg", **SLOW), OPTIONS[options])
    for seed in range(4):
        case.step([take(k, seed, [k, k, k, (k + 1) % K, (k + 2) % K]) for k in range(K)])
    case.compare_states()


def test_agents_without_a_batch_or_without_peers_rows_are_as_by_themselves():
    case = Case(tiny("td3", policy_delay=2, **SLOW), OPTIONS["by agent, remembered"])
    case.step([take(0, 1), None, take(2, 1, [2])])
    case.step([take(0, 2), take(1, 2), take(2, 2)])
    case.step([None, take(1, 3, [1]), None])
    case.compare_states()
    assert [agent.updates for agent in case.agents] == [2, 2, 2]
    assert case.update([None] * K) == ([False] * K, None)


def test_a_batch_that_weighs_nothing_leaves_its_agent_and_its_noise_as_they_are():
    case = Case(options=DpsConfig(divergence="isolated"))
    case.step([take(0, 1), take(1, 1, [0, 2]), take(2, 1)])
    assert [agent.updates for agent in case.agents] == [1, 0, 1]
    case.step([take(k, 2) for k in range(K)])
    case.compare_states()


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
