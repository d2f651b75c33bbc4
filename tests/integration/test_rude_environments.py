"""Environments that raise what is meant for others, end the process, or leave something behind."""

import re
import subprocess
import sys

import pytest
from children import importing
from integration.commands import TESTS, dase
from patience import PATIENCE_S
from small import small_flags

pytestmark = pytest.mark.slow


def rude(what: str, *, steps: int = 150) -> list[str]:
    flags = small_flags("rude:Misbehaves", train__steps=steps, train__checkpoint_every=40)
    return [*flags, "--set", f"env.kwargs={{what = '{what}'}}"]


@pytest.mark.parametrize(
    ("what", "name"),
    [pytest.param("stops_iterating", "StopIteration", marks=pytest.mark.long), ("exits", "SystemExit")],
)
def test_what_an_environment_raises_for_others_costs_an_episode_and_its_traceback_is_kept(train, what, name):
    run = train(*rude(what))
    assert run.end() == 0, run.output
    assert f"agent 0 at step 59: the environment raised {name}" in run.log("learner-0")
    assert f"in {what}" in run.log("learner-0")
    assert "note: agent 0 had its environment made anew 2 times because it raised (step: 2)" in run.output
    assert run.curve(0).step[-1] == 150


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(["--max-restarts=0"], id="cluster", marks=pytest.mark.long),
        pytest.param(["--lockstep"], id="lockstep"),
    ],
)
def test_an_exit_of_the_environment_that_may_not_be_made_anew_is_a_failure_with_its_traceback(train, mode):
    run = train(*rude("exits"), "--set=env.max_restarts=0", *mode)
    assert run.end() == 1
    assert "error: " in run.output
    assert "at step 59: the environment raised SystemExit, that is, sys.exit(0) (rude.py, line" in run.output
    assert "in exits" in run.output
    assert run.nodes() == {}


def test_lockstep_that_hangs_in_an_environment_ends_with_a_sentence_and_can_be_resumed(train):
    run = train(*rude("sleeps_for_ever"), "--set=env.timeout_s=3", "--lockstep")
    assert run.end() == 1
    assert "error: the environment's step has not returned since" in run.output
    assert "in sleeps_for_ever" in run.output
    code, told = dase(run.path.parent, "verify", run.path)
    assert (code, "40" in told) == (0, True), told


def test_a_learner_that_its_environment_ends_is_no_success(train):
    run = train(*rude("ends_the_process"), "--max-restarts=0")
    assert run.end() == 1
    assert "ended before its last step although nothing failed" in run.output
    assert run.nodes() == {}


@pytest.mark.long
def test_a_learner_that_its_environment_ends_goes_on_from_its_last_checkpoint(train):
    run = train(*rude("ends_the_process", steps=90))  # in a process's 60th step; the second one starts at 40
    assert run.end() == 0, run.output
    assert re.search(
        r"learner-. ended \(exit code 0, before its last step\); it is started again", run.output
    )
    assert run.curve(0).step[-1] == run.curve(1).step[-1] == 90


@pytest.mark.long
def test_a_learner_that_is_killed_is_started_again_although_its_environment_has_forked(train):
    run = train(*rude("forks_and_is_killed_once"))
    assert run.end() == 0, run.output
    assert len(re.findall(r"note: learner-. was started again once \(killed by SIGKILL\)", run.output)) == 1
    run.until_nobody_is_left()  # the forked one has the same command line


@pytest.mark.long
def test_a_thread_that_an_environment_leaves_does_not_keep_a_run_from_ending(train):
    run = train(*rude("leaves_a_thread"))
    assert run.end() == 0, run.output
    assert run.nodes() == {}


@pytest.mark.parametrize(
    "mode",
    [pytest.param([], id="cluster", marks=pytest.mark.long), pytest.param(["--lockstep"], id="lockstep")],
)
def test_an_environment_that_changes_the_folder_does_not_move_the_results(train, mode):
    run = train(*rude("leaves_the_folder"), *mode)
    assert run.end() == 0, run.output
    assert run.curve(0).step[-1] == 150
    assert run.directory.report.exists()


LOCAL = """
import os, pathlib, meddling
meddling.DEEDS["leaves the folder"]()

class Local(meddling.Meddles):
    def __init__(self, **kwargs):
        with (pathlib.Path(__file__).parent / "seen").open("a") as file:
            file.write(os.environ.get("CHANGED_BY_AN_ENVIRONMENT", "given") + "\\n")
        super().__init__(**kwargs)
"""


def test_nodes_start_where_their_launcher_did_with_the_variables_that_it_was_given(train, tmp_path):
    (tmp_path / "local_world.py").write_text(LOCAL)
    deeds = "['leaves the folder', 'sets a variable', 'sets the umask', 'computes in float64']"
    run = train(
        *small_flags("local_world:Local", train__steps=60, eval__every=60),
        "--set",
        f"env.kwargs={{when = 'constructor', deeds = {deeds}}}",
    )
    assert run.end() == 0, run.output
    seen = (tmp_path / "seen").read_text().split()
    assert seen.count("given") == 3, seen  # once in each of three processes
    assert run.directory.report.exists()
    assert run.curve(1).step[-1] == 60


@pytest.mark.long
def test_output_that_nobody_reads_does_not_end_a_run(tmp_path):
    command = [sys.executable, "-m", "dase_grpc", "train", "--name", "unread", *map(str, small_flags())]
    environment = importing(TESTS)
    run = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout.readline()
    run.stdout.close()
    assert (run.wait(PATIENCE_S), run.stderr.read()) == (0, "")
    run.stderr.close()
    assert (tmp_path / "runs" / "unread" / "report.html").exists()
