"""`dase drill` and its faults, against real processes: all recover, and the buffer holds what it should."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys

import pytest
from children import importing
from nodes.processes import TESTS
from patience import PATIENCE_S
from small import small_config, small_flags

from dase_grpc.launch.drill.drill import DrillOptions, drill_config, run_drill
from dase_grpc.launch.drill.evidence import read_buffer
from dase_grpc.launch.drill.faults import BEYOND_TTL_S, STRIKES, Fault

pytestmark = [pytest.mark.slow, pytest.mark.faults]


def drill(*arguments):
    """The command as a process of its own session, where the tests' worlds are found."""
    return subprocess.Popen(
        [sys.executable, "-m", "dase_grpc", "drill", *small_flags(), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=importing(TESTS),
        start_new_session=True,
    )


def processes_about(folder):
    """Processes whose command line names a folder."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                if str(folder).encode() in file.read() and int(entry) != os.getpid():
                    found.append(int(entry))
        except OSError:
            pass  # it has ended meanwhile
    return found


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_a_drill_recovers_from_everything_and_loses_nothing(storm, tmp_path):
    process = drill(f"--dir={tmp_path / 'drill'}", "--json", "--seed=5")
    out, log = process.communicate()
    assert process.returncode == 0, log
    result = json.loads(out)
    assert result["good"] is True
    assert [fault["kind"] for fault in result["faults"]] == [
        "replay killed",
        "learner killed",
        "learner killed",
        "frozen, replaced",
        "black hole",
        "cut",
    ]
    assert all(fault["recovered_s"] < 120 for fault in result["faults"])
    assert "Traceback" not in log
    assert result["learner_processes"] == 5
    data, own = tmp_path / "drill/data", read_buffer(tmp_path / "drill/data", agents=2)
    files = storm.read_files(data)  # which shares no code with the service
    assert files.total == own.total == result["transitions"] == sum(files.sequences.values()) > 500
    assert {
        agent_id: files.sequences[agent_id, f"learner-{agent_id}"] for agent_id in (0, 1)
    } == own.committed
    assert files.rows.tobytes() == own.rows.tobytes()
    assert processes_about(tmp_path) == []


def test_a_drill_that_is_stopped_leaves_no_process(tmp_path):
    process = drill(f"--dir={tmp_path / 'drill'}")
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("replay killed") for line in lines), process.communicate()
    assert len(processes_about(tmp_path)) >= 4
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "the drill was stopped after 1 of 6 faults: all recovered" in out
    assert "FAILED" not in out
    assert "Traceback" not in err
    assert processes_about(tmp_path) == []


@pytest.mark.long
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", [int(text) for text in os.environ.get("DASE_STORM_SEEDS", "0").split(",")])
def test_a_storm_of_all_faults_in_any_order(storm, tmp_path, monkeypatch, seed):
    monkeypatch.setenv("PYTHONPATH", importing(TESTS)["PYTHONPATH"])
    rng = random.Random(seed)
    plan = [
        _drawn(rng.choice([*STRIKES]), rng) for _ in range(int(os.environ.get("DASE_STORM_FAULTS", "20")))
    ]
    config = drill_config(small_config(replay__capacity="64MiB"), tmp_path / "storm")
    result = asyncio.run(
        run_drill(DrillOptions(config, seed=seed), tmp_path / "storm", plan, lambda outcome: None)
    )
    assert result.problems == [], plan
    assert [outcome.note for outcome in result.outcomes if outcome.recovered_s is None] == []
    assert len(result.outcomes) == len(plan)
    files = storm.read_files(tmp_path / "storm/data")
    assert files.total == len(files.rows) == result.transitions


def _drawn(kind, rng):
    agents = (0, 1) if kind in ("replay killed", "cut") else (rng.choice([0, 1]),)
    lasts_s = BEYOND_TTL_S + rng.uniform(0, 3) if kind == "frozen, woken" else rng.uniform(0, 10)
    return Fault(kind, agents, lasts_s)
