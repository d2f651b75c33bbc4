"""evaluations.csv, metrics.jsonl and restarts.jsonl, and how restarts are told."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.logs import (
    EvaluationsFile,
    MetricsLog,
    Restart,
    append_restart,
    read_evaluations,
    read_metrics,
    read_restarts,
    told,
)

HEADER = "step,return_mean,return_std,episodes,wall_seconds\n"
TIME = "2026-01-02T03:04:05+00:00"
KILLED = Restart(TIME, "learner-1", "killed by SIGKILL", 1_000, 1.0)
RAISED = Restart(TIME, "learner-1", "exit code 1, ValueError: x", 0, 2.0)
LAST = Restart(TIME, "learner-1", "exit code 1, ValueError: x", 0, None)
REPLAY = Restart(TIME, "replay", "killed by SIGKILL", None, 1.0)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "agents" / "0" / "log"


def append(path, step=1000, mean=-1.5):
    rest = {"return_std": 0.25, "episodes": 10, "wall_seconds": 12.3456}
    EvaluationsFile(path).append(step=step, return_mean=mean, **rest)


# -- evaluations.csv -----------------------------------------------------------------------------------


def test_the_file_has_exactly_the_agreed_columns_whatever_numbers_are_given(file):
    append(file)
    append(file, step=np.int64(2000), mean=np.float32(0.5))
    append(file, step=3000, mean=1 / 3)
    rows = ["1000,-1.5,0.25,10,12.346", "2000,0.5,0.25,10,12.346", "3000,0.3333333333333333,0.25,10,12.346"]
    assert file.read_text() == HEADER + "".join(f"{row}\n" for row in rows)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=5))
def test_returns_survive_the_file_to_the_last_bit(tmp_path_factory, means):
    file = tmp_path_factory.mktemp("evaluations") / "evaluations.csv"
    for mean in means:
        append(file, mean=mean)
    np.testing.assert_array_equal(read_evaluations(file).return_mean, np.array(means))


def test_columns_come_back_as_arrays_and_none_from_a_missing_file(file):
    assert len(read_evaluations(file)) == 0
    append(file)
    found = read_evaluations(file)
    assert (found.step.dtype, found.episodes.dtype) == (np.int64, np.int64)
    row = (found.step[0], found.return_std[0], found.episodes[0], found.wall_seconds[0])
    assert row == (1000, 0.25, 10, 12.346)


@pytest.mark.parametrize("torn", ["2000,0.3", "2000", HEADER[:9]])
def test_a_line_that_a_kill_left_unfinished_is_not_read_and_is_replaced(file, torn):
    before = int(torn != HEADER[:9])
    file.parent.mkdir(parents=True)
    if before:
        append(file)
    with file.open("a") as end:
        end.write(torn)
    assert len(read_evaluations(file)) == before
    append(file, step=3000)
    assert read_evaluations(file).step[-1] == 3000
    assert torn not in file.read_text().splitlines()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("step,return\n1,2\n", "its first line is not"),
        (f"{HEADER}1000,1,2\n", "line 2 is not 5 numbers"),
        (f"{HEADER}1000,1,2,10,1\nx,1,2,10,1\n", "line 3 is not 5 numbers"),
        *(
            (f"{HEADER}{step},1,1,{episodes},1\n", "line 2 is not 5 numbers")
            for step, episodes in (
                (10**400, 1),
                (2**53, 1),
                (-1, 1),
                (1, 10**400),
                ("9" * 5_000, 1),
                (1, -1),
            )
        ),
        *((f"{HEADER}1,1,1,1,{seconds}\n", "line 2 is not 5 numbers") for seconds in ("inf", "nan", "-1")),
    ],
)
def test_a_damaged_file_is_refused_with_the_line(tmp_path, text, reason):
    (tmp_path / "e.csv").write_text(text)
    with pytest.raises(RunDirectoryError, match=reason):
        read_evaluations(tmp_path / "e.csv")


@pytest.mark.parametrize("read", [read_evaluations, read_metrics, read_restarts])
def test_a_binary_file_is_refused(tmp_path, read):
    (tmp_path / "e").write_bytes(b"\xff\xff\n")
    with pytest.raises(RunDirectoryError, match="it is not text"):
        read(tmp_path / "e")


def test_a_file_that_a_spreadsheet_has_saved_is_read_as_before(file):
    append(file, mean=1.5)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    append(file, mean=2.5)
    assert read_evaluations(file).return_mean.tolist() == [1.5, 2.5]


# -- metrics.jsonl -------------------------------------------------------------------------------------


def test_metrics_come_back_with_null_for_what_is_not_finite(file):
    log = MetricsLog(file)
    log.append({"step": np.int64(5), "critic_loss": math.nan, "similarity": {0: np.float32(0.5), "1": None}})
    log.append({"step": 10, "divergence_mean": math.inf, "refused": {}})
    assert "NaN" not in file.read_text()
    assert "Infinity" not in file.read_text()
    assert read_metrics(file) == [
        {"step": 5, "critic_loss": None, "similarity": {"0": 0.5, "1": None}},
        {"step": 10, "divergence_mean": None, "refused": {}},
    ]


def test_what_json_cannot_hold_is_a_mistake_and_leaves_no_line(file):
    with pytest.raises(TypeError):
        MetricsLog(file).append({"step": object()})
    assert read_metrics(file) == []


@pytest.mark.parametrize("torn", ['{"step": 2, "cri', '{"step"', "\x00\x00\x00\n", "[1]\n"])
def test_a_damaged_last_line_of_metrics_is_left_out_and_one_without_an_end_replaced(file, torn):
    log = MetricsLog(file)
    log.append({"step": 1})
    with file.open("a") as end:
        end.write(torn)
    assert read_metrics(file) == [{"step": 1}]
    if not torn.endswith("\n"):
        log.append({"step": 2})
        assert read_metrics(file) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize(
    "record",
    [
        '{"st',
        '{"step":"a"}',
        '{"step":[1]}',
        '{"step":true}',
        '{"step":-1}',
        '{"step":1e999}',
        '{"step":2,"wall_seconds":"x"}',
        '{"step":2,"wall_seconds":-1}',
        '{"step":2,"refused":[1]}',
        '{"step":2,"refused":{"a":"x"}}',
        '{"step":2,"similarity":5}',
        '{"step":2,"similarity":{"x":1}}',
        '{"step":2,"similarity":{"1":"a"}}',
        '{"step":2,"critic_loss":"y"}',
        '{"step":2,"critic_loss":{"a":1}}',
        '{"step":2,"refused":{"reward":null}}',
        '{"step":1.5}',
        '{"step":null}',
        "{}",
        "[" * 100_000,
    ],
)
def test_a_record_that_is_not_of_numbers_is_damage(tmp_path, record):
    (tmp_path / "m.jsonl").write_text(f'{{"step":1}}\n{record}\n{{"step":3}}\n')
    with pytest.raises(RunDirectoryError, match="line 2 is no record of numbers"):
        read_metrics(tmp_path / "m.jsonl")


# -- restarts.jsonl ------------------------------------------------------------------------------------


def test_what_is_appended_is_read_again_and_a_torn_line_is_not(file):
    assert read_restarts(file) == []
    for each in (KILLED, LAST):
        append_restart(file, each)
    with file.open("a") as end:
        end.write('{"time":')
    assert read_restarts(file) == [KILLED, LAST]
    append_restart(file, REPLAY)
    assert read_restarts(file) == [KILLED, LAST, REPLAY]


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
    reasons = "(killed by SIGKILL; exit code 1, ValueError: x)"
    assert told([]) == {}
    assert told([KILLED]) == {"learner-1": "started again once (killed by SIGKILL)"}
    assert told([KILLED, REPLAY, RAISED, RAISED, LAST]) == {
        "learner-1": f"started again 3 times and then given up {reasons}",
        "replay": "started again once (killed by SIGKILL)",
    }
    assert told([LAST]) == {"learner-1": "given up (exit code 1, ValueError: x)"}
