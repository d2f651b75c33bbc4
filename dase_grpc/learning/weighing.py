"""Weighs an agent's batch with as little of its policy as that takes."""

from torch import Tensor

from dase_grpc.learning.agents.agent import Agent
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.similarity.weigher import SimilarityWeigher, Weighing


def weighed(agent: Agent, weigher: SimilarityWeigher, batch: Batch) -> tuple[Weighing, Tensor | None]:
    """The weights, and π(s) of the whole batch where the coming `update` goes on from it.

    Where it would not, the policy is asked about the external rows alone.
    """
    rows = None if agent.uses_actions else weigher.rows_to_judge(batch)
    if rows is None:
        actions = agent.policy_actions(batch.observation)
        return weigher.weigh(batch, actions), actions
    actions = agent.policy_actions(batch.observation.index_select(0, rows))
    return weigher.weigh(batch, actions, rows=rows), None
