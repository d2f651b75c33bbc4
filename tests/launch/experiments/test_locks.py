"""Who may run what of an experiment at the same time, whatever the host."""

import os

import pytest
from contracts.sentences import assert_one_sentence

from dase_grpc.errors import RunDirectoryError
from dase_grpc.launch.experiments import locks as locks_module
from dase_grpc.launch.experiments.locks import ExperimentLocks


@pytest.fixture
def locks(tmp_path, monkeypatch):
    monkeypatch.setattr(locks_module, "ORPHANS_S", 0.2)
    monkeypatch.setattr(locks_module, "GONE_HOST_S", 0.2)
    return ExperimentLocks(tmp_path / "e" / ".experiment")


def refused(block) -> RunDirectoryError:
    with pytest.raises(RunDirectoryError) as error, block:
        pass
    return error.value


def test_different_cells_run_at_once_and_more_may_be_queued_meanwhile(locks):
    with locks.one_cell("a", print), locks.one_cell("b", print), locks.queueing():
        pass


def test_a_cell_is_run_by_one_process(locks):
    said = []
    with locks.one_cell("a", print):
        error = refused(locks.one_cell("a", said.append))
    assert said == ["a is run by another process; waiting for its end"]
    assert_one_sentence(error, "another process still runs", "/e/a after 0.2 s")
    with locks.one_cell("a", print):
        pass


def test_who_runs_all_cells_is_alone(locks):
    with locks.all_cells(print):
        assert_one_sentence(refused(locks.one_cell("a", print)), "a dase experiment runs all cells of")
        assert_one_sentence(refused(locks.queueing()), "another dase experiment runs in")
    with locks.one_cell("a", print):
        assert_one_sentence(refused(locks.all_cells(lambda _: None)), "or jobs of a cluster, still write to")


def test_two_do_not_queue_at_once(locks):
    with locks.queueing():
        assert_one_sentence(refused(locks.queueing()), "another dase experiment runs in")


def test_what_keeps_a_descriptor_open_keeps_the_lock(locks):
    with locks.one_cell("a", print) as descriptors:
        held = [os.dup(each) for each in descriptors]
    try:
        assert_one_sentence(refused(locks.one_cell("a", lambda _: None)), "another process still runs")
    finally:
        for each in held:
            os.close(each)
