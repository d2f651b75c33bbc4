"""Disk and memory of an experiment's cells: what may be there at once has to fit."""

import pytest
from contracts.sentences import assert_one_sentence
from launch.experiment_cases import small_cells
from replay.buffer.store_cases import SCHEMA

from dase_grpc.errors import ConfigError
from dase_grpc.launch import room
from dase_grpc.launch.experiments.experiment import cells_at_once, require_disk, require_memory
from dase_grpc.replay.buffer.durable import reserved_bytes

SIZE = reserved_bytes(SCHEMA, 1_000)


@pytest.fixture
def fits(monkeypatch, tmp_path):
    """Whether cells fit on a disk with room for `buffers` of them; three cores run one cell, six two."""

    def fits(cells, *, buffers: float, jobs: int = 6, kept: bool = False) -> bool:
        monkeypatch.setattr(room, "free_disk", lambda path: int(buffers * SIZE))
        try:
            require_disk(
                cells,
                {each.name: SCHEMA for each in cells},
                tmp_path,
                at_once=cells_at_once(cells, jobs),
                kept=kept,
                limit="--jobs",
            )
        except ConfigError as error:
            assert_one_sentence(error, "are free; free space there", str(tmp_path))
            return False
        return True

    return fits


def clusters(**settings):
    return small_cells(mode="cluster", seed=[0, 1, 2, 3], settings=settings)


def test_those_that_may_run_at_once_have_to_fit(fits):
    assert not fits(clusters(), buffers=1.9)
    assert fits(clusters(), buffers=2)
    assert fits(clusters(), buffers=1, jobs=3)
    assert fits(clusters(), buffers=1, jobs=1)  # one that needs more cores than there are runs alone
    assert not fits(clusters(), buffers=0.9, jobs=1)


def test_where_finished_cells_keep_theirs_all_have_to_fit(fits):
    assert not fits(clusters(), buffers=3.9, kept=True)
    assert fits(clusters(), buffers=4, kept=True)


def test_the_largest_ones_count(fits):
    cells = small_cells(mode="cluster", replay__capacity=[100, 1_000, 200])
    assert not fits(cells, buffers=0.9, jobs=1)
    assert fits(cells, buffers=1, jobs=1)


def test_what_is_there_already_takes_nothing_more(fits, tmp_path):
    cells = clusters()
    for cell in cells[:3]:
        (tmp_path / cell.name / "replay").mkdir(parents=True)
        (tmp_path / cell.name / "replay" / "rows").touch()
    assert fits(cells, buffers=1)


@pytest.mark.parametrize(
    "cells",
    [small_cells(seed=[0, 1]), clusters(**{"replay.storage": "memory"}), []],
    ids=["lockstep", "memory", "none"],
)
def test_cells_without_a_reserved_buffer_need_no_room(fits, cells):
    assert fits(cells, buffers=0)


# -- memory ------------------------------------------------------------------------------------------


def memory_of(cell) -> int:
    return room.buffer_bytes(cell.config, SCHEMA) + room.networks_bytes(cell.config, SCHEMA, None)


def refusal_of(monkeypatch, cells, *, free: int, at_once: int) -> ConfigError | None:
    monkeypatch.setattr(room, "free_memory", lambda: free)
    schemas = {each.name: SCHEMA for each in cells}
    try:
        require_memory(cells, schemas, at_once=at_once, gpus=None, limit="--jobs")
    except ConfigError as error:
        return error
    return None


def test_buffers_and_networks_of_cells_in_one_process_that_may_run_at_once_have_to_fit(monkeypatch):
    cells = small_cells(train__steps=[50, 100], seed=[0, 1])
    need = sorted(map(memory_of, cells))
    assert refusal_of(monkeypatch, cells, free=need[-1], at_once=1) is None
    assert refusal_of(monkeypatch, cells, free=need[-1] + need[-2], at_once=2) is None
    error = refusal_of(monkeypatch, cells, free=need[-1] + need[-2] - 1, at_once=2)
    assert_one_sentence(
        error, "2 cells at once take at least", "are available; lower --jobs, replay.capacity"
    )
    error = refusal_of(monkeypatch, cells, free=need[-1] - 1, at_once=1)
    assert_one_sentence(
        error, "cell steps-100_seed-0 takes at least", "lower replay.capacity or agent.hidden"
    )


def test_of_a_cluster_with_its_buffer_on_disk_the_networks_alone_have_to_fit(monkeypatch):
    cells = clusters()
    networks = room.networks_bytes(cells[0].config, SCHEMA, None)
    assert refusal_of(monkeypatch, cells, free=networks, at_once=1) is None
    assert refusal_of(monkeypatch, cells, free=networks - 1, at_once=1) is not None
    assert refusal_of(monkeypatch, clusters(**{"replay.storage": "memory"}), free=networks, at_once=1)
    assert refusal_of(monkeypatch, [], free=0, at_once=1) is None
