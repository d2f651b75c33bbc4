"""`dase resume` after real signals to real processes, and with real environments."""

import random
import signal
import time
from pathlib import Path

import pytest
from integration.commands import ENDLESS, Command, dase
from launch.resuming import assert_equal, config, resume, train, train_until
from patience import PATIENCE_S
from small import small_flags
from typer.testing import CliRunner

from dase_grpc.cli.main import app
from dase_grpc.errors import DaseError
from dase_grpc.process.ends import boot_id
from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import inspect
from dase_grpc.runs.checkpoint import latest, load_checkpoint
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.files import FolderLock
from dase_grpc.runs.logs import read_evaluations

pytestmark = pytest.mark.slow


def hit(command: Command, directory: Path, step: int, kind: signal.Signals) -> None:
    """Sends a signal once both agents have been evaluated at a step."""
    curves = [directory / f"agents/{agent_id}/evaluations.csv" for agent_id in (0, 1)]
    command.until(lambda: all(step in read_evaluations(curve).step for curve in curves))
    assert command.end(kind) == (0 if kind == signal.SIGTERM else -kind)


FLAGS = small_flags(train__steps=560, train__checkpoint_every=70, replay__capacity=500, eval__every=70)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("straight")
    code, output = dase(folder, "train", "--lockstep", "--name", "run", *FLAGS)
    assert code == 0, output
    return RunDirectory.open(folder / "runs/run")


@pytest.mark.parametrize("kind", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_lockstep_run_that_was_hit_by_a_signal_anywhere_is_resumed_as_if_it_had_not_been(
    tmp_path, straight, kind
):
    command = Command(tmp_path, "train", "--lockstep", "--name", "run", *FLAGS)
    directory = tmp_path / "runs/run"
    hit(command, directory, 70 * random.randint(2, 5), kind)  # the first checkpoint follows step 70's
    code, output = dase(tmp_path, "resume", "runs/run")
    assert code == 0, output
    assert_equal(straight, RunDirectory.open(directory))
    verified(directory)


def verified(directory: Path) -> str:
    """What `dase verify` says of a run that is whole."""
    ended = CliRunner().invoke(app, ["verify", str(directory)])
    assert ended.exit_code == 0, ended.output
    return ended.output


def stopped_cluster(folder: Path, kind: signal.Signals, *flags: str) -> tuple[RunDirectory, list[int]]:
    """A cluster that was hit by a signal after a while, and the steps of its checkpoints."""
    flags = (*small_flags(train__steps=ENDLESS, train__checkpoint_every=70), *flags)
    directory = folder / "runs/run"
    hit(Command(folder, "train", "--name", "run", *flags), directory, 150, kind)
    limit = time.monotonic() + PATIENCE_S
    while still_written(directory):
        assert time.monotonic() < limit, "nodes are left"
        time.sleep(0.05)
    opened = RunDirectory.open(directory)
    return opened, [load_checkpoint(latest(agent.checkpoints)).step for agent in opened.agents()]


def still_written(directory: Path) -> bool:
    try:
        for agent in RunDirectory.open(directory).agents():
            FolderLock.acquire(agent.path).close()
        DataDirectory.open(directory / "replay").close()
    except DaseError:
        return True
    return False


@pytest.mark.parametrize("kind", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_cluster_goes_on_with_its_buffer(tmp_path, kind):
    directory, steps = stopped_cluster(tmp_path, kind)
    before = inspect(directory.replay, boot_id=boot_id())
    assert before is not None
    assert f"the buffer, {before.transitions:,} transitions of 2 writers" in verified(directory.path)
    total = max(steps) + 130
    code, output = dase(tmp_path, "resume", "runs/run", "--steps", total)
    assert code == 0, output
    opened = RunDirectory.open(directory.path)
    assert opened.run["resumed"][0]["from_steps"] == steps
    assert (
        f"restored run run from {opened.replay}: {before.transitions} transitions of 2 writers"
        in (opened.logs / "replay.log").read_text()
    )
    for agent, step in zip(opened.agents(), steps, strict=True):
        kept = load_checkpoint(latest(agent.checkpoints))
        assert kept.step == total
        assert int(kept.tensors["updates"]) >= total - 20 - 1  # none was left out, but where the signal came
        assert read_evaluations(agent.evaluations.path).step.tolist() == sorted({*range(0, total, 50), total})
        assert step > 0
    after = inspect(opened.replay, boot_id=boot_id())
    assert after is not None
    assert after.transitions == min(1_000, before.transitions + sum(total - step for step in steps))


@pytest.mark.long
def test_a_cluster_without_a_buffer_goes_on_with_an_empty_one_if_that_is_asked_for(tmp_path):
    directory, steps = stopped_cluster(tmp_path, signal.SIGTERM, "--set=replay.storage=memory")
    total = max(steps) + 130
    code, output = dase(tmp_path, "resume", "runs/run", "--steps", total)
    assert code == 2
    assert "was kept in memory and is gone; with --empty-buffer the agents go on with an" in output
    code, output = dase(tmp_path, "resume", "runs/run", "--steps", total, "--empty-buffer")
    assert code == 0, output
    opened = RunDirectory.open(directory.path)
    assert opened.run["resumed"][0]["from_steps"] == steps
    for agent in opened.agents():
        kept = load_checkpoint(latest(agent.checkpoints))
        assert kept.step == total
        updates = int(kept.tensors["updates"])  # one that comes late finds what the other has stored
        missed = 20 - 1 + 1  # while it fills the buffer, and where the signal came before a batch
        assert total - 20 + 1 - missed <= updates <= total - 20 + 1
        curve = read_evaluations(agent.evaluations.path).step.tolist()
        assert curve == sorted({*range(0, total, 50), total})
    logs = [(opened.logs / f"learner-{each}.log").read_text() for each in (0, 1)]
    assert any("updates begin once this agent has stored 20 new ones" in log for log in logs)


LATER = [
    pytest.param(each, marks=pytest.mark.long)
    for each in ("Hopper-v5", "Humanoid-v5", "LunarLanderContinuous-v3")
]


@pytest.mark.parametrize("env", ["HalfCheetah-v5", *LATER])
def test_a_real_environment_is_taken_to_where_it_was(tmp_path, env):
    """Contacts, warm starts and random pushes included; the break is within an episode."""
    settings = config(
        env,
        train__steps=1_000,
        train__log_every=250,
        train__checkpoint_every=500,
        agent__start_steps=300,
        agent__hidden=[32, 32],
        replay__capacity=1_500,
        eval__every=500,
        eval__max_episode_steps=100,
    )
    whole = train(tmp_path, settings, "straight")
    assert_equal(whole, resume(train_until(tmp_path, settings, 777)))
