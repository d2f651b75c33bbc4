"""Every benchmark runs in a tiny setting, as a program of its own, and says something."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from children import importing
from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"

TINY = {
    "against_reverb": "--quick --task=narrow --reverb=none",
    "checkpoints": "--env=InvertedPendulum-v5 --capacity=500 --every=250",
    "growth": "--quick",
    "gpu": "--device=cpu --quick",
    "page": "--results=none --page=page.md",
    "recovery": "--csv=out.csv --kills=1 --freezes=0 --partitions=0",
    "replay": "--seconds=0.05 --rounds=1 --fill=500",
    "restart": "--sizes 1000",
    "run_time": "--quick --env=InvertedPendulum-v5 --warmup=20",
    "shards": "--shards 1 2 --clients=1 --rounds=1 --seconds=0.05",
    "similarity_gate": "--measure=jeffreys --half=random --seeds=0 --steps=60 --agents=2 --jobs=1",
    "similarity_study": "--measure=jeffreys --task=Hopper-v5 --seeds=0 --steps=90 --jobs=1",
    "soak": "--csv=out.csv --minutes=0.05 --learners=1 --warm-up=0 --every=0.2",
    "stack": "--quick",
    "storm": "--kills=1 --writers=1 --capacity=1000 --every=0.2",
    "update_floor": "--quick",
    "updates": "--seconds=0.05",
}
NOT_ALONE = {
    "authors_run": "run_time.py starts it on a copy of their code; test_replay_benchmarks.py does, too",
    "complexity": "four runs of up to four processes; test_complexity.py measures each",
    "complexity_variants": "complexity.py starts it",
    "distance": "needs the right to shape the network's traffic",
    "reverb_process": "needs Reverb",
    "tcp_gather": "against_reverb.py starts it",
}


def programs() -> set[str]:
    return {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}


def test_every_benchmark_is_run_here_or_says_why_not():
    assert programs() == TINY.keys() | NOT_ALONE.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_runs(name, tmp_path):
    (tmp_path / "page.md").write_text("no sections yet\n")
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", *TINY[name].split()],
        cwd=tmp_path,
        env=importing(ROOT),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"\d", done.stdout + (tmp_path / "page.md").read_text())
