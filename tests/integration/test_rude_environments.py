"""Environments that raise what is meant for others, end the process, or leave something behind."""

import subprocess
import sys

import pytest
from children import importing
from integration.test_train_command import TESTS, train  # noqa: F401 - a fixture
from small import small_flags

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def rude(what: str) -> list[str]:
    flags = small_flags("rude:Misbehaves", train__steps=150)
    return [*flags, "--set", f"env.kwargs={{what = '{what}'}}"]


@pytest.mark.parametrize(("what", "name"), [("stops_iterating", "StopIteration"), ("exits", "SystemExit")])
def test_what_an_environment_raises_for_others_is_a_failure_with_its_traceback(train, what, name):  # noqa: F811
    run = train(*rude(what))
    assert run.end() == 1
    assert f"RuntimeError: the environment or the agent raised {name}" in run.output
    assert f"in {what}" in run.output
    assert run.nodes() == {}


def test_lockstep_takes_an_exit_of_the_environment_for_a_failure_too(train):  # noqa: F811
    run = train(*rude("exits"), "--lockstep")
    assert run.end() == 1
    assert "the environment or the agent raised SystemExit" in run.output


def test_a_learner_that_its_environment_ends_is_no_success(train):  # noqa: F811
    run = train(*rude("ends_the_process"))
    assert run.end() == 1
    assert "ended before its last step although nothing failed" in run.output
    assert run.nodes() == {}


def test_a_thread_that_an_environment_leaves_does_not_keep_a_run_from_ending(train):  # noqa: F811
    run = train(*rude("leaves_a_thread"))
    assert run.end() == 0, run.output
    assert run.nodes() == {}


@pytest.mark.parametrize("mode", [[], ["--lockstep"]], ids=["cluster", "lockstep"])
def test_an_environment_that_changes_the_folder_does_not_move_the_results(train, mode):  # noqa: F811
    run = train(*rude("leaves_the_folder"), *mode)
    assert run.end() == 0, run.output
    assert run.curve(0).step[-1] == 150
    assert run.directory.report.exists()


def test_output_that_nobody_reads_does_not_end_a_run(tmp_path):
    command = [sys.executable, "-m", "dase_grpc", "train", "--name", "unread", *map(str, small_flags())]
    environment = importing(TESTS)
    run = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout.readline()
    run.stdout.close()
    assert (run.wait(90), run.stderr.read()) == (0, "")
    run.stderr.close()
    assert (tmp_path / "runs" / "unread" / "report.html").exists()
