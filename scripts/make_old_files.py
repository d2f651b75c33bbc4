"""Makes tests/data/files-of-2e58290.tar.xz: files that an earlier version wrote, which today's must read.

git worktree add --detach OLD 2e58290
python scripts/make_old_files.py OLD

The archive holds a run of two agents in lockstep (`run`), how the old version itself went on with it
(`resumed`, its evaluations only), a replay's data directory (`replay`), and the torch and the processor
that brought these numbers about (`made_on`).
"""

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

import torch

ARCHIVE: Final = Path(__file__).parents[1] / "tests" / "data" / "files-of-2e58290.tar.xz"
STEPS: Final = 200
RESUMED_STEPS: Final = 300
KEPT: Final = ("run/run.toml", "run/agents/*/*.*", "run/agents/*/checkpoints/*/*", "run/replay/*")
SETTINGS: Final = {
    "env.id": "worlds:PointGoal",
    "train.agents": "2",
    "train.steps": str(STEPS),
    "train.log_every": "50",
    "train.checkpoint_every": "100",
    "agent.hidden": "[8, 8]",
    "agent.batch_size": "32",
    "agent.start_steps": "40",
    "replay.capacity": "150",
    "replay.min_size": "40",
    "eval.every": "50",
    "eval.episodes": "2",
}
DASE: Final = "from dase_grpc.__main__ import run; run()"
REPLAY: Final = '''
"""Two agents join; the buffer of 64 goes round; one agent leaves and one keeps its lease."""
from pathlib import Path
from store_cases import SCHEMA, rows_of
from dase_grpc.store.run import SharedRun

run = SharedRun.on_disk(
    "old-run", capacity=64, min_size=1, seed=0, ttl_s=10.0, data_dir=Path("replay"), boot_id="then", now=0.0
)
for agent in (0, 1):
    run.join(f"learner-{agent}", wanted=agent, run_id="", schema=SCHEMA, now=0.0, node_id=f"node-{agent}")
for agent, count in ((0, 50), (1, 30)):
    serials = range(1_000 * agent, 1_000 * agent + count)
    run.store.append(f"writer-{agent}", 1, rows_of(serials, agent), agent_id=agent)
run.leases.leave(1, run.leases.held(1).epoch, because="it has finished")
run.close()
'''


def main(old: Path) -> None:
    """Runs the version in `old` and packs what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        settings = [f"--set={key}={value}" for key, value in SETTINGS.items()]
        _run(old, work, "-c", DASE, "train", "--lockstep", "--runs=.", "--name=run", *settings)
        shutil.copytree(work / "run", work / "resumed")
        _run(old, work, "-c", DASE, "resume", "resumed", f"--steps={RESUMED_STEPS}")
        _run(old, work, "-c", REPLAY)
        (work / "made_on").write_text(machine(), encoding="utf-8")
        resumed = sorted(work.glob("resumed/agents/*/evaluations.csv"))
        run = sorted(path for pattern in KEPT for path in work.glob(pattern))
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for path in (work / "made_on", *run, *resumed, *sorted(work.glob("replay/*"))):
                archive.add(path, path.relative_to(work))
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes")


def machine() -> str:
    """What decides the last bit of a lockstep run's numbers, besides its seed."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = next((line for line in cpu.splitlines() if line.startswith("model name")), platform.machine())
    return f"torch {torch.__version__}, {model.rpartition(':')[2].strip()}"


def _run(old: Path, work: Path, *arguments: str) -> None:
    paths = os.pathsep.join(map(str, (old, old / "tests", old / "tests" / "store")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *arguments], cwd=work, env=environment, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
