"""ChildRun: whoever hears what a run says does not stop it."""

import sys
from typing import Any

import pytest
from patience import PATIENCE_S

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
