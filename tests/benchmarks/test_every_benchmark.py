"""Every benchmark runs in a tiny setting, as a program of its own, and says something."""

import re
import sys
from pathlib import Path

import pytest
from children import importing, ran

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"

TINY = {
    "checkpoints": "--env=InvertedPendulum-v5 --capacity=26000 --every=500",
    "growth": "--quick",
    "in_place_stress": "--minutes=0.02",
    "large_pages": "--quick",
    "page": "--results=none --docs=.",
    "recovery": "--csv=out.csv --kills=1 --freezes=0 --partitions=0",
    "replay": "--seconds=0.1 --rounds=2 --fill=500",
    "restart": "--sizes 1000",
    "run_time": "--quick --env=InvertedPendulum-v5 --warmup=20",
    "scale": "--quick",
    "serving": "--quick",
    "shards": "--shards 1 2 --clients=1 --rounds=1 --seconds=0.05",
    "similarity_gate": "--measure=jeffreys --half=random --seeds=0 --steps=60 --agents=2 --jobs=1",
    "similarity_study": "--measure=jeffreys --task=Hopper-v5 --seeds=0 --steps=90 --jobs=1",
    "soak": "--csv=out.csv --minutes=0.1 --learners=1 --warm-up=0 --every=0.5",
    "startup": "--quick --agents 1",
    "storm": "--kills=1 --writers=1 --capacity=1000 --every=0.2",
    "subnormals": "--quick",
    "update_floor": "--quick",
    "updates": "--seconds=0.05",
}
LONG = {
    "growth",
    "in_place_stress",
    "recovery",
    "run_time",
    "scale",
    "serving",
    "similarity_gate",
    "similarity_study",
    "soak",
    "startup",
    "update_floor",
}
"""What takes five seconds and more of a processor."""
PAGES = ("performance.md", "scale.md")
TOO_SHORT = {"soak": "looks at replay after the warm-up are too few; run longer"}
"""What looks at a buffer that was written round has nothing to say of a moment."""
NOT_HERE = {
    "against_reverb": "test_replay_benchmarks.py runs it and looks at more",
    "authors_run": "run_time.py starts it on a copy of their code; test_replay_benchmarks.py does, too",
    "complexity": "four runs of up to four processes; test_complexity.py measures each",
    "complexity_variants": "complexity.py starts it",
    "distance": "needs the right to shape the network's traffic",
    "gpu": "test_gpu_benchmark.py runs it and looks at more",
    "reverb_process": "needs Reverb",
    "scale_clients": "scale.py starts it",
    "stack": "test_gpu_benchmark.py runs it and looks at more",
    "studies": "test_studies.py runs it on an experiment",
    "study_page": "test_studies.py runs it on what is kept of one",
    "tcp_gather": "against_reverb.py starts it",
}


def programs() -> set[str]:
    return {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}


def test_every_benchmark_is_run_here_or_says_why_not():
    assert programs() == TINY.keys() | NOT_HERE.keys()


@pytest.mark.parametrize("name", sorted(LONG))
def test_what_takes_long_at_least_says_what_it_does(name, script, called):
    assert "--" in called(script(name), "--help")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in TINY]
)
def test_a_benchmark_runs(name, tmp_path):
    for page in PAGES:
        (tmp_path / page).write_text("page 1, without sections\n")
    program = FOLDER / f"{name}.py"
    done = ran(sys.executable, program, *TINY[name].split(), cwd=tmp_path, env=importing(ROOT))
    assert done.returncode == 0 or TOO_SHORT.get(name, "\0") in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"\d", done.stdout + (tmp_path / PAGES[0]).read_text())
