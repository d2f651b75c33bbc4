"""restarts.jsonl, and how it is told."""

import pytest

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.logs import Restart, append_restart, read_restarts, told

TIME = "2026-01-02T03:04:05+00:00"
KILLED = Restart(TIME, "learner-1", "killed by SIGKILL", 1_000, 1.0)
RAISED = Restart(TIME, "learner-1", "exit code 1, ValueError: x", 0, 2.0)
LAST = Restart(TIME, "learner-1", "exit code 1, ValueError: x", 0, None)
REPLAY = Restart(TIME, "replay", "killed by SIGKILL", None, 1.0)


def test_what_is_appended_is_read_again_and_a_torn_line_is_not(tmp_path):
    path = tmp_path / "restarts.jsonl"
    assert read_restarts(path) == []
    for each in (KILLED, LAST):
        append_restart(path, each)
    with path.open("a") as file:
        file.write('{"time":')
    assert read_restarts(path) == [KILLED, LAST]
    append_restart(path, REPLAY)
    assert read_restarts(path) == [KILLED, LAST, REPLAY]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        "no JSON",
        '{"time":1,"node":"replay","why":"x","from_step":null,"pause_s":1}',
        '{"time":"","node":"replay","why":"x","from_step":null,"pause_s":"1"}',
    ],
)
def test_a_damaged_line_is_named_unless_it_is_the_last(tmp_path, line):
    path = tmp_path / "restarts.jsonl"
    path.write_text(f"{line}\n")
    assert read_restarts(path) == []
    append_restart(path, KILLED)
    with pytest.raises(
        RunDirectoryError, match=r"restarts\.jsonl is damaged: line 1 is no restart of a node"
    ):
        read_restarts(path)


def test_failures_are_told_by_node_with_each_reason_once():
    assert told([]) == {}
    assert told([KILLED]) == {"learner-1": "started again once (killed by SIGKILL)"}
    assert told([KILLED, REPLAY, RAISED, RAISED, LAST]) == {
        "learner-1": (
            "started again 3 times and then given up (killed by SIGKILL; exit code 1, ValueError: x)"
        ),
        "replay": "started again once (killed by SIGKILL)",
    }
    assert told([LAST]) == {"learner-1": "given up (exit code 1, ValueError: x)"}
