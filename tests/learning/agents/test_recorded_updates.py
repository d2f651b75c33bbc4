"""A learner with a recorder against one without: every kind of batch, counted and skipped alike."""

from types import SimpleNamespace

import numpy as np
import pytest
from learning.agent_cases import tiny
from learning.td3_cases import CPU, SCHEMA, B, assert_same, columns
from learning.tracing import Traces, products_are_the_same

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.config.sections import ReplayConfig
from dase_grpc.learning.agents.memory import OWN as OWN_MEMORY
from dase_grpc.learning.agents.memory import StackedMemory
from dase_grpc.learning.agents.sac import SAC
from dase_grpc.learning.agents.snapshots import LearnersGuide
from dase_grpc.learning.similarity.weigher import SimilarityWeigher
from dase_grpc.learning.training.state import Counters
from dase_grpc.learning.training.statistics import DeviceTotals, Window
from dase_grpc.learning.training.updates import Updates
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.metrics.nodes import LearnerMetrics

OWN = 1
MIXED, OWN_ONLY, OTHERS, FAR_OTHERS = "mixed", "own only", "others only", "others that weigh nothing"


def rows_of(kind, step):
    rows = np.zeros((B, SCHEMA.width), np.float32)
    for name, values in columns(step).items():
        rows[:, SCHEMA.columns[name]] = values.reshape(B, -1)
    drawn = np.random.default_rng(step).integers(0, 3, B)
    drawn[0] = OWN
    if kind == OWN_ONLY:
        drawn[:] = OWN
    elif kind != MIXED:
        drawn[:] = 0
    if kind == FAR_OTHERS:
        rows[:, SCHEMA.columns["action"]] = 1e6 * (1 + np.arange(B))[:, np.newaxis]
    SCHEMA.agent_ids(rows)[:] = drawn
    return rows


class Side:
    """An agent's updates of given batches."""

    def __init__(self, batches, recorder):
        alone = None if recorder is None else StackedMemory(1)
        memory = OWN_MEMORY if alone is None else alone.of(0)
        self.agent = SAC(tiny("sac"), SCHEMA, seed=1, agent_id=0, device=CPU, autograd=True, memory=memory)
        self.totals, self.window = DeviceTotals.zero(CPU, memory=memory), Window(0.0, 0, 0)
        self.registry = make_registry()
        waiting = iter(batches)
        self.parts = SimpleNamespace(
            agent=self.agent,
            agent_id=OWN,
            schema=SCHEMA,
            device=CPU,
            config=SimpleNamespace(
                agent=SimpleNamespace(batch_size=B), train=SimpleNamespace(agents=3), replay=ReplayConfig()
            ),
            weigher=SimilarityWeigher(DpsConfig(), own_id=OWN, agents=3, masked=True, memory=memory),
            source=SimpleNamespace(next=lambda: (next(waiting), 100)),
            metrics=LearnerMetrics(self.registry, OWN),
            clock=lambda: 0.0,
            guide=LearnersGuide(self.agent),
            alone=alone,
            recorder=recorder,
            name_at=lambda step: "an agent",
        )
        collection = SimpleNamespace(took_batch=lambda: None, refilling=False)
        self.updates = Updates(self.parts, Counters(), collection, totals=self.totals, window=self.window)

    def counted(self):
        return (self.window.skipped, self.agent.updates, self.agent.take_steps(), self.totals.take())


@pytest.mark.slow
def test_with_a_recorder_a_learner_makes_and_skips_the_same_updates(monkeypatch):
    if not products_are_the_same():
        pytest.skip("batched products of this processor are not those of one by one, to the bit")
    # as where it is not on a CPU: the policy is asked about all rows at once
    monkeypatch.setattr(SimilarityWeigher, "rows_to_judge", lambda *_: None)
    kinds = [MIXED, OWN_ONLY, MIXED, OTHERS, MIXED, FAR_OTHERS] * 12
    batches = [rows_of(kind, step) for step, kind in enumerate(kinds)]
    traces = Traces()
    recorded, plain = Side(batches, traces), Side(batches, None)
    for step in range(len(batches)):
        look, expected = recorded.updates.update(), plain.updates.update()
        assert look == expected, step
    assert_same(recorded.agent.state_dict(), plain.agent.state_dict())
    counted = recorded.counted()
    assert counted == plain.counted()
    assert kinds.count(FAR_OTHERS) <= counted[0] < len(kinds) - 50
    assert len(traces.recorded) == 2
