"""benchmarks/scale.py: what is stored twice or not at all fails it; a table has a column for each crowd."""

from collections import Counter
from pathlib import Path

import pytest


@pytest.fixture
def processes(script):
    return script("scale_processes")


def replay_with(processes, *shards):
    """A replay whose shards have had so much processor time by then, in seconds each."""
    found = processes.Replays.in_folder(Path("nowhere"), len(shards), 1_000)
    for shard, seen in zip(found.shards, shards, strict=True):
        shard.seen = list(seen)
    return found


def test_cores_are_those_of_the_busiest_shard_as_a_mean_and_in_the_busiest_second(processes):
    calm = [(second / 4, second / 40) for second in range(40)]
    burst = [(at, cpu + (0.8 if at >= 5 else 0.0)) for at, cpu in calm]
    second = 1.0
    replay = replay_with(processes, calm, burst)
    assert replay.cores(0.0) == pytest.approx(burst[-1][1] / burst[-1][0])
    assert replay.cores(0.0, within_s=second) == pytest.approx(0.9)
    assert replay.cores(6.0, within_s=second) == pytest.approx(0.1)


@pytest.mark.parametrize("numbers", [[1, 2, 3, 3], [1, 2], [1, 2, 3, 4]])
def test_rows_that_are_not_there_once_each_are_found(script, processes, monkeypatch, numbers):
    schema = script("scale_clients").SCHEMA
    rows = schema.empty(len(numbers))
    rows[:] = 0
    rows[:, 1] = numbers
    files = script("storm").Files(len(rows), rows, {})
    monkeypatch.setattr(processes, "read_files", lambda folder: files)
    replay = replay_with(processes, [])
    with pytest.raises(processes.Lost, match="were acknowledged"):
        replay.require_once(Counter({(0, 0, 0): 3}))


def test_rows_that_are_there_once_each_are_all_that_is_asked_for(script, processes, monkeypatch):
    rows = script("scale_clients").SCHEMA.empty(3)
    rows[:] = 0
    rows[:, 1] = [1, 2, 3]
    monkeypatch.setattr(processes, "read_files", lambda folder: script("storm").Files(3, rows, {}))
    replay_with(processes, []).require_once(Counter({(0, 0, 0): 3}))


def test_the_table_has_a_column_for_each_crowd_in_their_order(script):
    scale = script("scale")
    crowds = scale.Crowd(1_000, 0, 4), scale.Crowd(256, 4, 1)
    for crowd in crowds:
        crowd.note("all left, s", 0.25)
    lines = scale.tables([figure for crowd in crowds for figure in crowd.figures]).splitlines()
    assert "|  | 1,000, 4 shards | 256 x (1 + 4) |" in lines
    assert "| all left, s | 0.2 | 0.2 |" in lines
