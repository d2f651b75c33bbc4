"""All agents in one process, round-robin or as a stack, bit-for-bit reproducible from the run's seed."""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Event
from typing import Final

import numpy as np
import torch
from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0

from dase_grpc import seeding
from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import DivergedError, EnvironmentFailedError, EnvironmentSpecError, Halted
from dase_grpc.learning.agents.device import pick_device
from dase_grpc.learning.agents.memory import OWN, StackedMemory
from dase_grpc.learning.agents.policy import Published
from dase_grpc.learning.envs.make import Environment, require_same_environment, schema_of
from dase_grpc.learning.envs.restarts import RestartableEnv, exploring_env
from dase_grpc.learning.training.build import build_learner, pairing, recorder_of
from dase_grpc.learning.training.learner import Learner, StackedLearners
from dase_grpc.learning.training.parts import LocalPolicies
from dase_grpc.learning.training.state import Saved
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.process.containment import Contained
from dase_grpc.process.watchdog import OnHang, Watch, watchdog
from dase_grpc.progress import Progress
from dase_grpc.replay.buffer.priorities import DrawnBatch
from dase_grpc.replay.buffer.ring import RingBuffer
from dase_grpc.replay.buffer.sampling import Sampling, Source
from dase_grpc.replay.buffer.store import ReplayStore
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.files import staged_file, written
from dase_grpc.runs.journal import AgentJournal
from dase_grpc.runs.rounds import RoundLog, WholeRound, read_rows
from dase_grpc.schema import Array, TransitionSchema

BUFFER_FILE: Final = "buffer.npy"

_log = logging.getLogger("dase")


class LocalReplay:
    """One agent's sink and source on a buffer in this process.

    Attributes:
        prioritised: how the last batch was drawn, if by priorities.
    """

    def __init__(self, store: ReplayStore, config: RunConfig, agent_id: int) -> None:
        self._store = store
        self._batch_size = config.agent.batch_size
        self._min_size = config.replay.min_size
        self._agent_id = agent_id
        self._source = Source(store, agent_id, Sampling.of(config))
        self.prioritised: DrawnBatch | None = None
        self._writer = f"learner-{agent_id}"
        self.rng = seeding.generator(config.train.seed, seeding.Purpose.SAMPLING, agent_id, 0)

    def store(self, row: Array) -> None:
        """Stores a transition at once."""
        first = self._store.committed(self._writer, agent_id=self._agent_id) + 1
        self._store.append(self._writer, first, row[np.newaxis], agent_id=self._agent_id)

    def next(self) -> tuple[Array, int] | None:
        """Draws a batch; None while the buffer is short of replay.min_size, or of rows to draw from."""
        if self._source.shortage(self._min_size) is not None:
            return None
        rows, drawn = self._source.draw(self._batch_size, self.rng)
        if drawn is not None and (priorities := self._source.priorities) is not None:
            self.prioritised = DrawnBatch(drawn, priorities)
        return rows, len(self._store.ring)


@dataclass(frozen=True)
class ResumedRound:
    """Where a run goes on, and how long each agent had trained by then, in seconds."""

    whole: WholeRound
    elapsed_s: tuple[float, ...]


@dataclass(frozen=True)
class LockstepRun:
    """A run in one process: its learners and their ends of the buffer, by agent id, and the buffer.

    What is `together` takes the learners' steps where their agents are a stack.
    """

    learners: list[Learner]
    replays: list[LocalReplay]
    store: ReplayStore
    directory: RunDirectory
    rounds: RoundLog
    together: StackedLearners | None = None

    @property
    def progress(self) -> list[Progress]:
        """How far each agent is."""
        return [learner.progress for learner in self.learners]

    def begin(self, halt: Event) -> None:
        """Has each learner begin; all are prepared."""
        if self.together is not None:
            self.together.begin(halt)
        else:
            for learner in self.learners:
                learner.begin(halt)

    def step(self) -> None:
        """One step of each agent, in order; after a stop within a round, of those that have not had it."""
        if self.together is not None:
            self.together.round()
        else:
            self._take_turns()
        if any(learner.checkpoint_due for learner in self.learners):
            for learner in self.learners:
                learner.keep()
            self.keep_round()

    def _take_turns(self) -> None:
        done = min(learner.steps for learner in self.learners)
        for learner in self.learners:
            if learner.steps == done:
                learner.step()

    def keep_round(self) -> None:
        """Keeps the buffer, with the checkpoints that each learner has just kept."""
        self.rounds.keep(
            [learner.steps for learner in self.learners],
            [seeding.generator_state(replay.rng) for replay in self.replays],
            rows=self.store.ring.slices(),
            total=self.store.ring.total,
            priorities={agent: each.state() for agent, each in self.store.priorities.items()},
        )


@contextmanager
def open_lockstep(
    config: RunConfig,
    directory: RunDirectory,
    *,
    gpu: int | None = None,
    stacked: bool = False,
    configs: Sequence[RunConfig] = (),
    resumed: ResumedRound | None = None,
    on_hang: OnHang | None = None,
) -> Iterator[LockstepRun]:
    """Builds everything; environments and journals are closed when the block ends, however it ends.

    `stacked` agents are updated at once instead of one by one, and have to be alike. `configs` are the
    agents' own, where those are not what the run's makes of them; sizes and bounds of their environments have
    to be the same. A `resumed` run goes on bit for bit as if there had been no break, where the environments
    repeat an episode. `on_hang` is called when an environment does not return (`watchdog`).

    Raises:
        EnvironmentSpecError, DeviceError, CapacityError: in one sentence.
    """
    configs = configs or [config.for_agent(agent_id) for agent_id in range(config.train.agents)]
    device = pick_device(gpu, [each.agent for each in configs])
    memory = StackedMemory(len(configs)) if stacked else None
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.train.threads)
        watches = [Watch(f"agent {agent_id}") for agent_id in range(len(configs))]
        if on_hang is not None:
            stack.enter_context(watchdog(watches, timeout_s=config.env.timeout_s, on_hang=on_hang))
        envs = [
            stack.enter_context(closing(exploring_env(each.env, watch)))
            for each, watch in zip(configs, watches, strict=True)
        ]
        schema = _shared_schema(envs, configs, name=config.env.id)
        store = ReplayStore(RingBuffer(schema, config.replay.capacity))
        replays = [LocalReplay(store, each, agent_id) for agent_id, each in enumerate(configs)]
        agents = list(zip(configs, replays, envs, strict=True))
        learners = _learners(directory, config, agents, schema, stack=stack, device=device, memory=memory)
        together = None
        if memory is not None:
            together = StackedLearners(learners, memory, recorder=recorder_of(config, device))
        rounds = RoundLog(directory, None if resumed is None else resumed.whole.round)
        run = LockstepRun(learners, replays, store, directory, rounds, together)
        if resumed is not None:
            _resume(run, resumed, schema)
        yield run


def _learners(
    directory: RunDirectory,
    config: RunConfig,
    agents: Sequence[tuple[RunConfig, LocalReplay, RestartableEnv]],
    schema: TransitionSchema,
    *,
    stack: ExitStack,
    device: torch.device,
    memory: StackedMemory | None,
) -> list[Learner]:
    """A learner for each agent; their journals are closed with the stack."""
    policies: dict[int, Published] = {}
    learners = []
    for agent_id, (own, replay, env) in enumerate(agents):
        journal = AgentJournal.open(directory.agent(agent_id), config=config, schema=schema)
        shown = LocalPolicies(agent_id, policies)
        learners.append(
            build_learner(
                own,
                schema,
                env=env,
                agent_id=agent_id,
                device=device,
                sink=replay,
                source=replay,
                journal=stack.enter_context(closing(journal)),
                metrics=LearnerMetrics(make_registry(), agent_id),
                pair=None if config.shares_experience else pairing(config, agent_id, shown),
                memory=OWN if memory is None else memory.of(agent_id),
            )
        )
    return learners


def run_lockstep(run: LockstepRun, halt: Event, on_round: Callable[[], None]) -> None:
    """Trains as `rounds` does to the end; `on_round` is called after each round, and may raise as a round."""
    trained = rounds(run, halt)
    for _ in trained:
        try:
            on_round()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the round has failed by it
            trained.throw(error)


def rounds(run: LockstepRun, halt: Event) -> Generator[None]:
    """Trains all agents to their budget, or until `halt`; each takes one step per round, in order.

    Every train.checkpoint_every rounds and at the end the agents' checkpoints are written and what the buffer
    has got since; at the end also replay/buffer.npy. To close the iterator is to halt.

    Raises:
        EnvironmentFailedError: an environment raised too often; what all agents have until then is kept as
            at the end, or nothing where an agent had not yet gone on from its checkpoint.
        DivergedError: an agent's networks or losses are not finite; the round before is kept.
    """
    failed: EnvironmentFailedError | None = None
    with Contained():  # where this fails nothing is kept: who is not prepared is not what had been saved
        for learner in run.learners:
            learner.prepare()
    try:
        going = _goes_on(lambda: run.begin(halt))
        while going and not halt.is_set() and not all(learner.done for learner in run.learners):
            going = _goes_on(run.step)
            if going:
                yield
    except EnvironmentFailedError as error:
        failed = error
    except GeneratorExit:
        _keep_last(run, failed)
        raise
    _keep_last(run, failed)


def _goes_on(work: Callable[[], None]) -> bool:
    """Does the work; whether training was not told to end meanwhile."""
    with Contained(), suppress(Halted):
        work()
        return True
    return False


def _keep_last(run: LockstepRun, failed: EnvironmentFailedError | None) -> None:
    """Keeps what there is of each agent at the end, and of the buffer; raises what has failed before."""
    try:
        for learner in run.learners:
            learner.finish()
        run.keep_round()
        save_buffer(run)
    except DivergedError as error:
        if failed is None:
            raise
        _log.error("%s", error)
    if failed is not None:
        raise failed from failed.__cause__


def save_buffer(run: LockstepRun) -> None:
    """Writes the buffer's packed rows; `numpy.load` reads them, `TransitionSchema.named` names them."""
    parts = run.store.ring.slices()  # written as they lie: a full buffer is not held twice
    header = {**header_data_from_array_1_0(parts[0]), "shape": (len(run.store.ring), parts[0].shape[1])}
    target = run.directory.replay / BUFFER_FILE
    with written(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(target) as file:
            write_array_header_1_0(file, header)
            for part in parts:
                file.write(part.data)


def _resume(run: LockstepRun, resumed: ResumedRound, schema: TransitionSchema) -> None:
    """Lets learners, buffer and generators go on from a round."""
    whole, store = resumed.whole, run.store
    for agent_id, checkpoint in enumerate(whole.checkpoints):
        require_same_environment(schema, checkpoint.schema)
        seeding.restore_generator(run.replays[agent_id].rng, whole.round.sampling[agent_id])
        saved = Saved(checkpoint.tensors, checkpoint.training, checkpoint.training_tensors)
        run.learners[agent_id].resume(saved, elapsed_s=resumed.elapsed_s[agent_id])
    rows = read_rows(run.directory.replay, whole.round.segments, first=whole.round.first)
    store.ring.take_over(rows, first=whole.round.first)
    for each in whole.round.priorities:
        store.priorities[each.agent_id].restore(each.read(run.directory.replay), each.largest)


def _shared_schema(
    envs: Sequence[Environment], configs: Sequence[RunConfig], *, name: str
) -> TransitionSchema:
    """The one layout of all agents' transitions, under the name of the run's environment."""
    schemas = [schema_of(env, each.env.id) for env, each in zip(envs, configs, strict=True)]
    shared = replace(schemas[0], environment=name)
    for schema in schemas:
        if replace(schema, environment=name) != shared:
            raise EnvironmentSpecError(
                f"environment {schema.environment!r} has {_sizes(schema)}, but {schemas[0].environment!r} of "
                f"agent 0 has {_sizes(shared)}; agents that share a buffer need the same"
            )
    return shared


def _sizes(schema: TransitionSchema) -> str:
    return (
        f"{schema.observation_size} observation and {schema.action_size} action components "
        f"within {list(schema.action_low)} and {list(schema.action_high)}"
    )
