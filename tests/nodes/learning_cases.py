"""Learners that cost next to nothing: a tiny world, tiny networks, few steps."""

import asyncio
import re
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nodes.running import in_this_loop
from patience import PATIENCE_S
from replay.wire.services import promptly

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.nodes.learner import run_learner
from dase_grpc.nodes.options import LearnerOptions
from dase_grpc.progress import Progress
from dase_grpc.replay.client.cluster import ClusterClient, open_channel
from dase_grpc.replay.client.handoff import Times
from dase_grpc.replay.wire.addresses import Address, ReplayPlace
from dase_grpc.replay.wire.messages import progress_from_proto
from dase_grpc.replay.wire.v1 import cluster_pb2
from dase_grpc.runs import checkpoint

FOREVER = 10_000_000
ENDLESS = {"train__steps": FOREVER, "eval__every": 10_000}
QUICK = Times(
    beat_s=0.02,
    wake_s=0.02,
    say_wait_after_s=0.1,
    look_at_wait_s=0.02,
    say_silent_after_s=0.2,
    away_after_s=0.1,
    find_again_s=0.05,
)
"""What takes seconds takes a fraction of one."""

SETTINGS: dict[str, dict[str, Any]] = {
    "env": {"id": "worlds:PointGoal"},
    "train": {"agents": 1, "steps": 80, "seed": 3, "log_every": 20},
    "agent": {"hidden": [8], "batch_size": 16, "start_steps": 20},
    "replay": {"capacity": 1_000, "min_size": 20},
    "eval": {"every": 40, "episodes": 1, "max_episode_steps": 20},
}


def tiny_config(**settings: Any) -> RunConfig:
    """The settings of a tiny run; changes are given as `section__key=value`."""
    named = ((*name.split("__", 1), value) for name, value in settings.items())
    changes = [{section: {key: value}} for section, key, value in named]
    return resolve(SETTINGS, *changes)


def learner_options(address: Address, run_dir: Path, **changes: Any) -> LearnerOptions:
    """Options of a learner of a tiny run; settings are given as `section__key=value`."""
    settings = {key: changes.pop(key) for key in list(changes) if "__" in key}
    options = {"replay": ReplayPlace.at(address), "timing": QUICK, **changes}
    return LearnerOptions(config=tiny_config(**settings), run_dir=run_dir, **options)


learning = partial(in_this_loop, run_learner)


async def status_of(address: Address) -> cluster_pb2.StatusResponse:
    async with open_channel(address) as channel:
        return await ClusterClient(channel, str(address)).status(timeout_s=PATIENCE_S)


async def until_trained(
    address: Address,
    *,
    agent_id: int = 0,
    epoch: int = 1,
    updates: int = 3,
    task: "asyncio.Task[None] | None" = None,
) -> Progress:
    """Waits until an agent has reported some updates; what its learner raised meanwhile is raised."""
    async with open_channel(address) as channel, asyncio.timeout(PATIENCE_S):
        client = ClusterClient(channel, str(address))
        while True:
            if task is not None and task.done():
                task.result()
                raise AssertionError("the learner has ended")
            for agent in (await client.status(timeout_s=PATIENCE_S)).agents:
                progress = progress_from_proto(agent.progress)
                if (agent.agent_id, agent.epoch) == (agent_id, epoch) and progress.updates >= updates:
                    return progress
            await asyncio.sleep(0.01)


async def train(options: LearnerOptions) -> bool:
    """Whether a learner, which must end soon, has taken its last step."""
    return bool(await promptly(run_learner(options, asyncio.Event())))


@asynccontextmanager
async def training(options: LearnerOptions, **until: Any) -> AsyncIterator[Any]:
    """`learning` that has reported some updates."""
    async with learning(options) as (task, stop):
        await until_trained(options.replay.addresses[0], task=task, **until)
        yield task, stop


async def until_stored(address: Address, transitions: int) -> None:
    """Waits until the buffer holds as many."""
    async with open_channel(address) as channel, asyncio.timeout(PATIENCE_S):
        client = ClusterClient(channel, str(address))
        while (await client.status(timeout_s=PATIENCE_S)).buffer.size < transitions:  # noqa: ASYNC110 - another node's state
            await asyncio.sleep(0.01)


def checkpoint_step(run_dir: Path, agent_id: int = 0) -> int:
    """The step of an agent's latest checkpoint, which must be readable."""
    latest = checkpoint.latest(run_dir / "agents" / str(agent_id) / "checkpoints")
    assert latest is not None
    return checkpoint.load_checkpoint(latest).step


def held_at_ends(caplog: pytest.LogCaptureFixture) -> list[int]:
    """How many transitions each replay held that has ended, in their order, as its last line says."""
    return [int(held.replace(",", "")) for held in re.findall(r"the buffer held ([\d,]+)", caplog.text)]


def compute_threads() -> list[str]:
    """Threads of learners that have not ended: those that are not idle in the loop's pool."""
    return [thread.name for thread in threading.enumerate() if _trains(thread)]


def _trains(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_qualname == "Learner.train":
            return True
        frame = frame.f_back
    return False
