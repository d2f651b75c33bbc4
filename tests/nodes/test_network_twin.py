"""The wire changes nothing: learners over gRPC end with the same bytes as the same learners in lockstep.

The learner node itself draws batches ahead of their use, so it is not bit-equal by design; here the
same learners store and sample over real streams, one row and one batch at a time.
"""

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from nodes.learning_cases import tiny_config
from replay.wire.services import eventually, promptly, serving

from dase_grpc.config.resolve import RunConfig
from dase_grpc.launch.lockstep import LockstepRun, open_lockstep, run_lockstep
from dase_grpc.learning.envs.make import make_env, schema_of
from dase_grpc.learning.training.build import build_learner
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.runs import checkpoint
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.journal import AgentJournal
from dase_grpc.runs.logs import read_evaluations
from dase_grpc.runs.rounds import RoundLog


class SynchronousLink:
    """Stores and samples over gRPC; each call is over when the service has done it."""

    def __init__(self, inserter: Inserter, sampler: Sampler) -> None:
        self._loop = asyncio.get_running_loop()
        self._inserter = inserter
        self._sampler = sampler

    def store(self, row):
        self._wait_for(self._store(row))

    def next(self):
        return self._wait_for(self._next())

    def _wait_for(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _store(self, row):
        await self._inserter.append(row[np.newaxis])
        await eventually(lambda: self._inserter.unacknowledged == 0)

    async def _next(self):
        await self._sampler.grant(1)
        batch = await self._sampler.next()
        return batch.rows, batch.buffer_size


def new_run(root: Path, name: str, config: RunConfig) -> RunDirectory:
    return RunDirectory.create(root, name, config, mode="test")


def in_lockstep(directory: RunDirectory) -> np.ndarray:
    """Runs in this process; returns the buffer."""
    with open_lockstep(directory.config, directory) as run:
        run_lockstep(run, threading.Event(), lambda: None)
        return run.store.ring.ordered()


async def over_grpc(directory: RunDirectory) -> np.ndarray:
    """Runs the same learners on streams of a service; returns its buffer."""
    config, agents = directory.config, range(directory.config.train.agents)
    envs = [make_env(config.env.id, config.env.kwargs) for _ in agents]
    schema = schema_of(envs[0], config.env.id)
    learners = []
    async with (
        serving(
            capacity=config.replay.capacity, min_size=config.replay.min_size, seed=config.train.seed
        ) as service,
        asyncio.TaskGroup() as tasks,
        AsyncExitStack() as cleanup,
    ):
        for agent_id in agents:
            target = await service.target(agent_id, schema=schema)
            inserter = await Inserter(target, writer_id=f"learner-{agent_id}").open()
            receiving = tasks.create_task(inserter.receive())
            sampler = await Sampler(target, batch_size=config.agent.batch_size).open(credits=0)
            link = SynchronousLink(inserter, sampler)
            journal = AgentJournal.open(directory.agent(agent_id), config=config, schema=schema)
            cleanup.callback(journal.close)
            cleanup.callback(receiving.cancel)
            cleanup.callback(sampler.cancel)
            learners.append(
                build_learner(
                    config,
                    schema,
                    env=envs[agent_id],
                    agent_id=agent_id,
                    device=torch.device("cpu"),
                    sink=link,
                    source=link,
                    journal=journal,
                    metrics=LearnerMetrics(make_registry(), agent_id),
                )
            )
        run = LockstepRun(learners, [], service.run.store, directory, RoundLog(directory))
        await promptly(asyncio.to_thread(run_lockstep, run, threading.Event(), lambda: None))
        return service.run.store.ring.ordered()


def results(directory: RunDirectory) -> list[tuple[bytes, list[float]]]:
    """Each agent's final networks and optimisers as bytes, and its evaluations."""
    found = []
    for agent in directory.agents():
        latest = checkpoint.latest(agent.checkpoints)
        assert latest is not None
        scores = read_evaluations(agent.evaluations.path).return_mean.tolist()
        found.append(((latest / checkpoint.STATE_FILE).read_bytes(), scores))
    return found


@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.slow
async def test_learners_over_grpc_end_like_the_same_learners_in_lockstep(agents, tmp_path):
    torch.set_num_threads(1)
    config = tiny_config(train__agents=agents, train__steps=70, replay__capacity=100)
    lockstep, networked = (new_run(tmp_path, name, config) for name in ("lockstep", "networked"))
    rows = in_lockstep(lockstep)
    assert (await over_grpc(networked)).tobytes() == rows.tobytes()
    assert len(results(lockstep)) == agents
    assert results(networked) == results(lockstep)
