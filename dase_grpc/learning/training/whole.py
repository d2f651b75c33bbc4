"""An agent's whole update, DPS included, as tensor work that can be recorded and replayed."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.graphs import Captured, Recorder
from dase_grpc.learning.similarity.weigher import SimilarityWeigher, Weighing
from dase_grpc.learning.training.statistics import DeviceTotals

Made = tuple[Weighing | None, Mapping[str, Tensor]]
"""The weights, None where every row weighs 1, and the losses."""


class WholeUpdate:
    """Weighs what is in `batch` and has the agent learn from it, as one recording for each kind of update.

    A kind is whether the update moves the actor (TD3 does so every second time) and whether the batch has
    external rows; without any nothing is weighed, and memory of earlier batches (`dps.memory`) does not
    age, as where nothing is recorded. Each kind is recorded when its turn has come often enough. What an
    update does to Python's state, and what it draws, comes before the recorded work, each time.

    Owned by the thread that trains the agent.

    Args:
        agent: one that learns by autograd.
        weigher: one that weighs with masks, as it does wherever it is not on a CPU.
        totals: what every weighed batch is counted in.
        batch: where each batch is found, always in the same tensors.
        recorder: what records; None does all as it is.
        name: whose update it is, for the log.
    """

    def __init__(
        self,
        agent: ActorCritic,
        weigher: SimilarityWeigher,
        totals: DeviceTotals,
        batch: Batch,
        *,
        recorder: Recorder | None,
        name: str,
    ) -> None:
        self._agent = agent
        self._weigher = weigher
        self._totals = totals
        self._batch = batch
        self._recorder = recorder
        self._name = name
        self._noise = agent.room_for_noise(batch)
        self._all_internal = torch.ones_like(batch.reward)
        self._kinds: dict[tuple[bool, bool], Captured[Made]] = {}

    def __call__(self, *, external: bool) -> Made:
        """One update from what `batch` holds; never waits for the device but to record.

        external says whether there are rows of other agents; there has to be a row of the agent's own, for
        weights that sum to 0 would be noticed on the device only. Tensors are valid until the next call.
        """
        kind = (self._agent.begin_update(self._noise), external)
        if kind not in self._kinds:
            work = partial(self._make, weighs=external)
            self._kinds[kind] = Captured(work, self._recorder, name=self._name)
        return self._kinds[kind]()

    def _make(self, *, weighs: bool) -> Made:
        agent, batch = self._agent, self._batch
        if not weighs:
            return None, agent.learn(batch, self._all_internal, *self._noise)
        weighing = self._weigher.weigh(batch, agent.policy_actions(batch.observation))
        self._totals.add(weighing)
        return weighing, agent.learn(batch, weighing.weight, *self._noise)
