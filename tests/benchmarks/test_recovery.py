"""benchmarks/recovery.py: what it plans, and that the page's table is that of the committed results."""

import argparse
import csv
from collections import Counter
from pathlib import Path

import pytest

from dase_grpc.config.resolve import RunConfig
from dase_grpc.launch.drill.faults import STRIKES, FaultOutcome
from dase_grpc.nodes.replay_options import LEASE_TTL_S

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results/recovery.csv"


@pytest.fixture
def recovery(script):
    return script("recovery")


def test_the_page_has_the_table_of_the_committed_results(recovery):
    table = "\n".join(recovery.table_of(RESULTS))
    assert table in (ROOT / "docs/reliability.md").read_text(encoding="utf-8")


def test_the_committed_results_are_those_asked_for_and_all_good(recovery):
    with RESULTS.open(newline="") as file:
        lines = list(csv.DictReader(file))
    kinds = Counter(line["kind"] for line in lines)
    assert kinds["learner killed"] >= 50
    assert kinds["frozen, replaced"] + kinds["frozen, woken"] >= 20
    assert kinds["cut"] + kinds["black hole"] >= 20
    checked = [line["note"] for line in lines if line["kind"] == recovery.CHECKED]
    assert checked
    assert all("nothing lost, doubled or torn" in note for note in checked)
    assert all(line["recovered_s"] for line in lines if line["kind"] != recovery.CHECKED)


def test_it_plans_what_it_is_asked_for(recovery):
    asked = argparse.Namespace(kills=50, freezes=20, partitions=20, shortest=1.0, longest=60.0, seed=3)
    plan = recovery.faults(asked, RunConfig())
    kinds = Counter(fault.kind for fault in plan)
    assert kinds == {
        "learner killed": 50,
        "frozen, replaced": 10,
        "frozen, woken": 10,
        "cut": 10,
        "black hole": 10,
    }
    assert set(kinds) <= set(STRIKES)
    assert all(fault.lasts_s > LEASE_TTL_S for fault in plan if fault.kind.startswith("frozen"))
    broken = [fault for fault in plan if fault.kind in ("cut", "black hole")]
    assert all(1 <= fault.lasts_s <= 60 for fault in broken)
    assert {(fault.kind, len(fault.agents)) for fault in broken} == {
        (kind, hit) for kind in ("cut", "black hole") for hit in (1, 2)
    }


def test_a_fault_that_nothing_recovered_from_shows_in_the_table(recovery, tmp_path):
    path = tmp_path / "out.csv"
    recovery.add_line(path, recovery.line_of(FaultOutcome("cut", (0, 1), 3.0, 2.5, "heal")))
    recovery.add_line(path, recovery.line_of(FaultOutcome("cut", (0,), 3.0, None, "", "stuck\nfor good")))
    recovery.add_line(path, recovery.line_of(FaultOutcome("frozen, woken", (0,), 3.0, None, "", "stuck")))
    assert list(recovery.table_of(path))[2:] == [
        "| cut | 2 | 1 | 2.5 s | 2.5 s | heal |",
        "| frozen, woken | 1 | 0 |  |  |  |",
    ]
