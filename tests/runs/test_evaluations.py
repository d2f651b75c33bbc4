"""evaluations.csv and metrics.jsonl."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.logs import EvaluationsFile, MetricsLog, read_evaluations, read_metrics

HEADER = "step,return_mean,return_std,episodes,wall_seconds\n"


def append(path: Path, step: int = 1000, mean: float = -1.5) -> None:
    EvaluationsFile(path).append(
        step=step, return_mean=mean, return_std=0.25, episodes=10, wall_seconds=12.3456
    )


def test_the_file_has_exactly_the_agreed_columns(tmp_path: Path) -> None:
    file = tmp_path / "agents" / "0" / "evaluations.csv"
    append(file)
    append(file, step=2000, mean=1 / 3)
    assert file.read_text() == f"{HEADER}1000,-1.5,0.25,10,12.346\n2000,0.3333333333333333,0.25,10,12.346\n"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=5))
def test_returns_survive_the_file_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, means: list[float]
) -> None:
    file = tmp_path_factory.mktemp("evaluations") / "evaluations.csv"
    for mean in means:
        append(file, mean=mean)
    np.testing.assert_array_equal(read_evaluations(file).return_mean, np.array(means))


def test_numpy_numbers_are_written_like_others(tmp_path: Path) -> None:
    append(tmp_path / "a.csv", step=np.int64(3), mean=np.float32(0.5))  # type: ignore[arg-type]
    append(tmp_path / "b.csv", step=3, mean=0.5)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_a_missing_file_has_no_evaluations(tmp_path: Path) -> None:
    assert len(read_evaluations(tmp_path / "evaluations.csv")) == 0


def test_columns_come_back_as_arrays(tmp_path: Path) -> None:
    append(tmp_path / "e.csv")
    found = read_evaluations(tmp_path / "e.csv")
    assert (found.step.dtype, found.episodes.dtype) == (np.int64, np.int64)
    assert (found.step[0], found.return_std[0], found.episodes[0], found.wall_seconds[0]) == (
        1000,
        0.25,
        10,
        12.346,
    )


@pytest.mark.parametrize("torn", ["2000,0.3", "2000", HEADER[:9]])
def test_a_line_that_a_kill_left_unfinished_is_not_read_and_is_replaced(tmp_path: Path, torn: str) -> None:
    file = tmp_path / "e.csv"
    if torn != HEADER[:9]:
        append(file)
    with file.open("a") as end:
        end.write(torn)
    assert len(read_evaluations(file)) == (torn != HEADER[:9])
    append(file, step=3000)
    assert read_evaluations(file).step[-1] == 3000
    assert torn not in file.read_text().splitlines()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("step,return\n1,2\n", "its first line is not"),
        (f"{HEADER}1000,1,2\n", "line 2 is not 5 numbers"),
        (f"{HEADER}1000,1,2,10,1\nx,1,2,10,1\n", "line 3 is not 5 numbers"),
    ],
)
def test_a_damaged_file_is_refused_with_the_line(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "e.csv").write_text(text)
    with pytest.raises(RunDirectoryError, match=reason):
        read_evaluations(tmp_path / "e.csv")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(b"\xff\xff\n")
    for read in (read_evaluations, read_metrics):
        with pytest.raises(RunDirectoryError, match="it is not text"):
            read(tmp_path / "e")


def test_metrics_come_back_with_null_for_what_is_not_finite(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "agents" / "0" / "metrics.jsonl")
    log.append({"step": np.int64(5), "critic_loss": math.nan, "similarity": {0: np.float32(0.5), "1": None}})
    log.append({"step": 10, "divergence_mean": math.inf, "refused": {}})
    assert "NaN" not in log.path.read_text()
    assert "Infinity" not in log.path.read_text()
    assert read_metrics(log.path) == [
        {"step": 5, "critic_loss": None, "similarity": {"0": 0.5, "1": None}},
        {"step": 10, "divergence_mean": None, "refused": {}},
    ]


def test_what_json_cannot_hold_is_a_mistake_and_leaves_no_line(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        MetricsLog(tmp_path / "m.jsonl").append({"step": object()})
    assert read_metrics(tmp_path / "m.jsonl") == []


@pytest.mark.parametrize("torn", ['{"step": 2, "cri', "\x00\x00\x00\n", "[1]\n"])
def test_a_damaged_last_line_of_metrics_is_left_out(tmp_path: Path, torn: str) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.append({"step": 1})
    with log.path.open("a") as end:
        end.write(torn)
    assert read_metrics(log.path) == [{"step": 1}]


def test_metrics_go_on_after_a_torn_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.append({"step": 1})
    with log.path.open("a") as end:
        end.write('{"step"')
    log.append({"step": 2})
    assert read_metrics(log.path) == [{"step": 1}, {"step": 2}]


def test_a_damaged_line_in_the_middle_of_metrics_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunDirectoryError, match="line 2 is no record of numbers"):
        read_metrics(tmp_path / "m.jsonl")


@pytest.mark.parametrize(
    "row",
    [
        f"{10**400},1,1,1,1",
        f"{2**53},1,1,1,1",
        "-1,1,1,1,1",
        f"1,1,1,{10**400},1",
        f"{'9' * 5_000},1,1,1,1",
        "1,1,1,-1,1",
    ],
)
def test_steps_and_episodes_are_counts(tmp_path: Path, row: str) -> None:
    (tmp_path / "e").write_text(f"step,return_mean,return_std,episodes,wall_seconds\n{row}\n")
    with pytest.raises(RunDirectoryError, match="line 2 is not 5 numbers"):
        read_evaluations(tmp_path / "e")


@pytest.mark.parametrize(
    "record",
    [
        '{"step":"a"}',
        '{"step":[1]}',
        '{"step":true}',
        '{"step":-1}',
        '{"step":1e999}',
        '{"wall_seconds":"x"}',
        '{"wall_seconds":-1}',
        '{"refused":[1]}',
        '{"refused":{"a":"x"}}',
        '{"similarity":5}',
        '{"similarity":{"x":1}}',
        '{"similarity":{"1":"a"}}',
        '{"critic_loss":"y"}',
        "[" * 100_000,
    ],
)
def test_a_record_that_is_not_of_numbers_is_damage(tmp_path: Path, record: str) -> None:
    (tmp_path / "m.jsonl").write_text(f'{{"step":1}}\n{record}\n{{"step":3}}\n')
    with pytest.raises(RunDirectoryError, match="line 2 is no record of numbers"):
        read_metrics(tmp_path / "m.jsonl")


def test_a_file_that_a_spreadsheet_has_saved_is_read_as_before(tmp_path: Path) -> None:
    file = EvaluationsFile(tmp_path / "evaluations.csv")
    file.append(step=5, return_mean=1.5, return_std=0.5, episodes=2, wall_seconds=1)
    file.path.write_bytes(b"\xef\xbb\xbf" + file.path.read_bytes().replace(b"\n", b"\r\n"))
    file.append(step=6, return_mean=2.5, return_std=0.5, episodes=2, wall_seconds=2)
    assert read_evaluations(file.path).return_mean.tolist() == [1.5, 2.5]
