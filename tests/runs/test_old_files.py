"""Files that an earlier version wrote, before the package had rooms: today's version goes on with them."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
from make_old_files import ARCHIVE, RESUMED_STEPS, STEPS, machine
from rich.console import Console

from dase_grpc.launch.checks import verify_here
from dase_grpc.launch.resume import ResumeOptions, resume_here
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_evaluations
from dase_grpc.runs.verify import verify


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The archive's files, anew for each test."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def columns(run: Path, agent: int) -> np.ndarray:
    """All of evaluations.csv but wall_seconds, which comes last."""
    found = read_evaluations(run / "agents" / str(agent) / "evaluations.csv")
    return np.stack([found.step, found.return_mean, found.return_std, found.episodes])


def test_an_old_run_is_sound_and_can_be_resumed(old):
    found = verify(old / "run")
    assert found.damaged == []
    assert found.resumable == f"all agents and the buffer from step {STEPS}"
    assert verify_here(old / "run", Console()) == 0


@pytest.mark.slow
def test_an_old_run_goes_on_as_the_old_version_went_on_with_it(old):
    resume_here(ResumeOptions(old / "run", steps=RESUMED_STEPS))
    same = (old / "made_on").read_text(encoding="utf-8") == machine()
    for agent in (0, 1):
        then, now = columns(old / "resumed", agent), columns(old / "run", agent)
        assert then[0].max() == RESUMED_STEPS
        # A machine of the same name may multiply in another order, and rounding grows while agents learn.
        np.testing.assert_allclose(now, then, rtol=1e-6 if same else 1e-3)
    assert verify(old / "run").damaged == []
    assert RunDirectory.open(old / "run").run["resumed"][0]["from_steps"] == [STEPS, STEPS]


@pytest.mark.parametrize("boot_id", ["then", "another"])
def test_an_old_data_directory_has_its_rows_writers_and_leases(old, boot_id):
    run = SharedRun("old-run", capacity=64, min_size=1, seed=0, ttl_s=10.0)
    run.keep_in(old / "replay", boot_id=boot_id, now=5.0)
    store = run.store
    assert len(store.ring) == 64
    rows = np.concatenate(store.ring.slices())
    serials = rows[:, store.schema.columns["policy_version"].start].view(np.uint32)
    assert serials.tolist() == [*range(16, 50), *range(1_000, 1_030)]
    assert (rows[:, 0] == serials).all()
    assert store.schema.agent_ids(rows).tolist() == [0] * 34 + [1] * 30
    assert {agent: store.committed(f"writer-{agent}", agent_id=agent) for agent in (0, 1)} == {0: 50, 1: 30}
    held, left = run.leases.all()
    assert (held.node_name, held.node_id, held.epoch, held.left_because) == ("learner-0", "node-0", 1, None)
    assert (left.node_name, left.epoch, left.left_because) == ("learner-1", 1, "it has finished")
    run.close()
