"""All agents round-robin in one process, bit-for-bit reproducible from the run's seed."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

import numpy as np
import torch

from dase_grpc import seeding
from dase_grpc.config import RunConfig
from dase_grpc.learning.build import build_learner
from dase_grpc.learning.device import pick_device
from dase_grpc.learning.envs import make_env, schema_of
from dase_grpc.learning.learner import Halted, Learner
from dase_grpc.progress import Progress
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.files import replace_file
from dase_grpc.runs.journal import AgentJournal
from dase_grpc.schema import Array
from dase_grpc.store import ReplayStore, RingBuffer
from dase_grpc.telemetry import LearnerMetrics, make_registry

BUFFER_FILE = "buffer.npy"


class LocalReplay:
    """One agent's sink and source on a buffer in this process."""

    def __init__(self, store: ReplayStore, config: RunConfig, agent_id: int) -> None:
        self._store = store
        self._batch_size = config.agent.batch_size
        self._min_size = config.replay.min_size
        self._agent_id = agent_id
        self._writer = f"learner-{agent_id}"
        self._rng = seeding.generator(config.train.seed, seeding.Purpose.SAMPLING, agent_id, 0)

    def store(self, row: Array) -> None:
        """Stores a transition at once."""
        first = self._store.committed(self._writer) + 1
        self._store.append(self._writer, first, row[np.newaxis], agent_id=self._agent_id)

    def next(self) -> tuple[Array, int]:
        """Draws a batch.

        Raises:
            Halted: the buffer is short of replay.min_size although every agent has explored.
        """
        size = len(self._store.ring)
        if size < self._min_size:
            raise Halted
        return self._store.sample(self._batch_size, self._rng, agent_id=self._agent_id), size


@dataclass(frozen=True)
class LockstepRun:
    """A run in one process: its learners, its buffer and its journals."""

    learners: list[Learner]
    store: ReplayStore
    journals: list[AgentJournal]
    directory: RunDirectory


def open_lockstep(config: RunConfig, directory: RunDirectory, *, gpu: int | None = None) -> LockstepRun:
    """Builds everything; the first environment decides the schema.

    Raises:
        EnvironmentSpecError, DeviceError, CapacityError: in one sentence.
    """
    device = pick_device(gpu)
    torch.set_num_threads(config.train.threads)
    envs = [make_env(config.env.id, config.env.kwargs) for _ in range(config.train.agents)]
    schema = schema_of(envs[0], config.env.id)
    store = ReplayStore(RingBuffer(schema, config.replay.capacity))
    journals, learners = [], []
    for agent_id, env in enumerate(envs):
        journal = AgentJournal.open(directory.agent(agent_id), config=config, schema=schema)
        replay = LocalReplay(store, config, agent_id)
        journals.append(journal)
        learners.append(
            build_learner(
                config,
                schema,
                env=env,
                agent_id=agent_id,
                device=device,
                sink=replay,
                source=replay,
                journal=journal,
                metrics=LearnerMetrics(make_registry(), agent_id),
            )
        )
    return LockstepRun(learners, store, journals, directory)


def run_lockstep(run: LockstepRun, halt: Event, on_round: Callable[[list[Progress], int], None]) -> None:
    """Trains all agents to their budget, or until `halt`; each takes one step per round, in order.

    `on_round` gets every agent's progress and the buffer's size after each round. At the end the
    checkpoints and the buffer (replay/buffer.npy, oldest transition first) are written.
    """
    try:
        for learner in run.learners:
            learner.begin()
        while not halt.is_set() and not all(learner.done for learner in run.learners):
            for learner in run.learners:
                learner.step()
            on_round([learner.progress for learner in run.learners], len(run.store.ring))
        for learner in run.learners:
            learner.finish()
        save_buffer(run)
    finally:
        for journal in run.journals:
            journal.close()


def save_buffer(run: LockstepRun) -> None:
    """Writes the buffer's packed rows; `numpy.load` reads them, `TransitionSchema.named` names them."""
    run.directory.replay.mkdir(parents=True, exist_ok=True)
    replace_file(run.directory.replay / BUFFER_FILE, _npy(run.store.ring.ordered()))


def _npy(rows: Array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, rows, allow_pickle=False)
    return stream.getvalue()
