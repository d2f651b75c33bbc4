"""ChildRun: neither who hears what a run says nor what it has left behind holds it up."""

import os
import signal
import sys
from typing import Any

import pytest
from children import lives, until_ended
from patience import PATIENCE_S, wait_until

from dase_grpc.errors import DaseError
from dase_grpc.launch import child
from dase_grpc.launch.child import ChildRun

FULL = 200_000
"""Characters: more than a pipe holds."""


@pytest.fixture
def talker(monkeypatch):
    """A program that says more than a pipe holds, a long line after the first."""
    code = f"print('first'); print('x' * {FULL}); print('last')"
    monkeypatch.setattr(child, "PROGRAM", [sys.executable, "-c", code])


def heard(say: Any) -> list[str]:
    with ChildRun([], say=say) as run:
        assert run.wait(PATIENCE_S)
        run.require_success()
        return list(run._said)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            ["note: this", "12:00:00 learner | error: agent 0 broke", "12:00:01 learner | results"],
            "agent 0 broke",
        ),
        (["12:00:00 learner | error: agent 0 broke", "error: the run broke"], "the run broke"),
        (
            ["error: learner-0 ended; its log:", "12:00:00 learner | error: the port is taken"],
            "the port is taken",
        ),
        (["nothing of use"], "the run ended with code 1:\nnothing of use"),
    ],
)
def test_a_run_that_failed_is_told_of_in_the_sentence_that_says_most(monkeypatch, said, told):
    code = f"import sys; print(*{said!r}, sep='\\n'); sys.exit(1)"
    monkeypatch.setattr(child, "PROGRAM", [sys.executable, "-c", code])
    with ChildRun([], say=lambda _: None) as run:
        assert run.wait(PATIENCE_S)
        with pytest.raises(DaseError) as failed:
            run.require_success()
    assert str(failed.value) == told


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_a_run_goes_on_where_its_lines_cannot_be_shown(talker, error):
    shown = []

    def say(line: str) -> None:
        shown.append(line)
        if line == "first":
            raise error

    assert heard(say)[-1] == "last"
    assert [line[:5] for line in shown] == ["first", "xxxxx", "last"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_goes_on_where_who_hears_it_has_a_bug(talker):
    def say(line: str) -> None:
        raise KeyError(line)

    assert heard(say)[-1] == "last"


@pytest.mark.parametrize("asked", [True, False])
def test_what_a_run_has_left_behind_is_killed_and_not_waited_for(monkeypatch, asked):
    """It has inherited the run's stdout, so that has no end as long as it lives."""
    monkeypatch.setattr(child, "PROGRAM", ["sh", "-c", "sleep 600 & echo $!; exit 0"])
    told = []
    with ChildRun([], say=told.append) as run:
        assert run.wait(PATIENCE_S)
        if asked:
            run.require_success()
    until_ended(int(told[0]))


LEFT_THE_GROUP = """
import os
left, leaves = os.pipe()
child = os.fork()
if child == 0:
    os.setsid()
    os.write(leaves, b"1")
    os.execvp("sleep", ["sleep", "600"])
os.read(left, 1)
print(child)
"""


def test_what_has_left_the_group_of_a_run_is_waited_for_only_so_long(monkeypatch):
    monkeypatch.setattr(child, "PROGRAM", [sys.executable, "-c", LEFT_THE_GROUP])
    monkeypatch.setattr(child, "READ_S", 0.1)
    told = []
    with ChildRun([], say=told.append) as run:
        assert run.wait(PATIENCE_S)
        wait_until(lambda: bool(told))
        run.require_success()
    assert lives(int(told[0]))
    os.kill(int(told[0]), signal.SIGKILL)
    run._reader.join(PATIENCE_S)
    assert not run._reader.is_alive()
