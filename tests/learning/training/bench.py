"""A learner among fakes: what it did, in order, what it wrote, and what it shows."""

import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from worlds import PointGoal

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.learning.agents.optimiser import Steps
from dase_grpc.learning.agents.snapshots import LearnersGuide
from dase_grpc.learning.envs.evaluation import Evaluator
from dase_grpc.learning.envs.explorer import Explorer
from dase_grpc.learning.envs.make import schema_of
from dase_grpc.learning.envs.noise import Gaussian
from dase_grpc.learning.similarity.weigher import SimilarityWeigher
from dase_grpc.learning.training.learner import Learner
from dase_grpc.learning.training.parts import LearnerParts
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.metrics.nodes import LearnerMetrics

BATCH = 8
OWN = 0


@dataclass
class StubAgent:
    """Does nothing, and notes what it was told."""

    events: list
    losses: dict = field(default_factory=lambda: {"critic_loss": 2.0, "q_mean": 3.0, "actor_loss": -1.0})
    updates: int = 0
    weights: list = field(default_factory=list)
    tried: int = 0
    left_out: int = 0
    ruined: bool = False
    uses_actions: bool = True

    def act(self, observation):
        return np.zeros((len(observation), 1), np.float32)

    def policy_actions(self, observation):
        return torch.zeros(len(observation), 1)

    def update(self, batch, weight, *, actions=None):
        self.updates += 1
        self.tried += 1
        self.left_out += self.ruined
        self.weights.append(weight.clone())
        self.events.append("update")
        return {name: torch.tensor(value) for name, value in self.losses.items()}

    def take_steps(self):
        steps = Steps(self.tried, self.left_out)
        self.tried = self.left_out = 0
        return {"critic": steps}

    def state_dict(self):
        return {"updates": torch.tensor(self.updates)}

    def load_state_dict(self, state):
        self.updates = int(state["updates"])


@dataclass
class ListSink:
    events: list
    rows: list = field(default_factory=list)

    def store(self, row):
        self.events.append("store")
        self.rows.append(row)


@dataclass
class ScriptedSource:
    """Gives batches of rows that the agents in `collectors` collected, with slightly varied actions."""

    schema: object
    events: list
    collectors: list
    versions: int = 0
    empty: bool = False

    def next(self):
        self.events.append("batch")
        if self.empty:
            return None
        rows = np.zeros((len(self.collectors), self.schema.width), np.float32)
        rows[:, self.schema.columns["action"]] = np.linspace(-0.3, 0.3, len(rows))[:, np.newaxis]
        rows[:, -2:].view(np.int32)[:, 0] = self.collectors
        rows[:, -2:].view(np.uint32)[:, 1] = self.versions
        rows.flags.writeable = False
        return rows, 1_000


@dataclass
class RecordingJournal:
    events: list
    evaluations: list = field(default_factory=list)
    records: list = field(default_factory=list)
    checkpoints: list = field(default_factory=list)

    def evaluation(self, **values):
        self.events.append(f"evaluation at {values['step']}")
        self.evaluations.append(values)

    def metrics(self, values):
        self.events.append(f"metrics at {values['step']}")
        self.records.append(values)

    def checkpoint(self, *, step, saved, scores):
        self.events.append(f"checkpoint at {step}")
        self.checkpoints.append((step, saved.agent, scores))


class Ticks:
    """A clock that goes on by a second whenever it is read, from 0."""

    def __init__(self):
        self.now = -1.0

    def __call__(self):
        self.now += 1.0
        return self.now


class Bench:
    """A learner among fakes; it is evaluated in worlds as its own, or as `evaluated` makes them."""

    def __init__(
        self,
        env=None,
        *,
        evaluated=None,
        collectors=(OWN,) * BATCH,
        agents=2,
        divergence="jeffreys",
        **settings,
    ):
        self.config: RunConfig = resolve(
            {
                "train": {"agents": agents, "steps": 6, "log_every": 100},
                "agent": {"batch_size": BATCH, "start_steps": 2},
                "replay": {"min_size": 1},
                "eval": {"every": 100, "episodes": 1, "max_episode_steps": 3},
            },
            {"dps": {"divergence": divergence}},
            *({section: {key: value}} for (section, key), value in _keys(settings)),
        )
        self.env = PointGoal() if env is None else env
        self.make_evaluated = evaluated or type(self.env)
        self.events: list[str] = []
        self.schema = schema_of(self.env, "a world")
        self.agent = StubAgent(self.events)
        self.sink = ListSink(self.events)
        self.source = ScriptedSource(self.schema, self.events, list(collectors))
        self.journal = RecordingJournal(self.events)
        self.registry = make_registry()
        self.guide = None

    def learner(self) -> Learner:
        config, schema = self.config, self.schema
        return Learner(
            LearnerParts(
                config=config,
                schema=schema,
                agent_id=OWN,
                device=torch.device("cpu"),
                agent=self.agent,
                explorer=Explorer(
                    self.env,
                    schema,
                    agent_id=OWN,
                    rng=np.random.default_rng(0),
                    episode_seed=lambda episode: 2 + 2 * episode,
                    start_steps=config.agent.start_steps,
                    noise=Gaussian(0.1),
                ),
                evaluator=Evaluator(
                    self.make_evaluated,
                    schema,
                    episodes=config.eval.episodes,
                    max_episode_steps=config.eval.max_episode_steps,
                    seed=1,
                ),
                weigher=SimilarityWeigher(config.dps, own_id=OWN, agents=config.train.agents),
                sink=self.sink,
                source=self.source,
                journal=self.journal,
                metrics=LearnerMetrics(self.registry, OWN),
                clock=Ticks(),
                guide=self.guide or LearnersGuide(self.agent),
            )
        )

    def train(self, halt: threading.Event | None = None) -> Learner:
        learner = self.learner()
        learner.train(halt or threading.Event())
        return learner

    def metric(self, name, **labels):
        return self.registry.get_sample_value(f"dase_{name}", {"agent_id": str(OWN), **labels})


def trained(env=None, **settings) -> Bench:
    """A bench whose learner has trained to its end."""
    bench = Bench(env, **settings)
    bench.train()
    return bench


def _keys(settings):
    return ((tuple(name.split("__")), value) for name, value in settings.items())
