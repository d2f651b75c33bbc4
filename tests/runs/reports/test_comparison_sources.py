"""Which runs are found and read, and which are left out with a reason."""

import os
from pathlib import Path

import pytest
from synthetic import flat, write_curve, write_run

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.reports.sources import find_runs, read_runs


def reasons(*paths: Path, unfinished: bool = False) -> list[str]:
    return [str(each) for each in read_runs(paths, unfinished=unfinished)[1]]


def test_runs_are_found_however_deep_and_once_each(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "b", "first", flat(1))
    second = write_run(tmp_path / "c", "second", flat(2))
    write_run(tmp_path, ".staging-half", flat(3))
    (first / "agents" / "0" / "run.toml").write_text("a run holds no other runs")
    assert find_runs([tmp_path, first, tmp_path / "c" / ".." / "c"]) == [first, second]


def test_linked_runs_and_folders_of_runs_are_found_once_and_a_link_to_above_ends(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    first = write_run(there, "first", flat(1))
    second = write_run(there / "more", "second", flat(2))
    third = write_run(here / "own", "third", flat(3))
    for link, target in (("a", first), ("latest", third), ("own/more", there / "more"), ("own/up", here)):
        (here / link).symlink_to(target)
    assert find_runs([here]) == [third, here / "own" / "more" / "second", here / "a"]
    assert [run.resolve() for run in find_runs([there, here])] == [first, second, third]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", r"empty holds no run; a run is a folder with a run\.toml"),
        ("absent", r"there is no .*absent; there is .*run$"),
    ],
)
def test_a_path_without_runs_is_one_sentence_even_beside_others(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    run = write_run(tmp_path, "run", flat(1))
    with pytest.raises(RunDirectoryError, match=words):
        find_runs([run, tmp_path / name])


def test_a_runs_curve_is_the_mean_over_its_agents_where_all_were_evaluated(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", [0, 1, 2, 3], [10, 21, 32, 43, 54], steps=3_000, seed=7)
    (read,), left_out = read_runs([run])
    assert left_out == []
    assert read.curve.step.tolist() == [0, 1000, 2000, 3000]
    assert read.curve.value.tolist() == [5, 11, 17, 23]
    assert (read.seed, read.agents, read.finished, read.name, read.mode) == (7, 2, True, "run", "test")


def test_damaged_runs_are_named_with_their_file(tmp_path: Path) -> None:
    toml = write_run(tmp_path, "toml", flat(1))
    (toml / "run.toml").write_text("[train")
    rows = write_run(tmp_path, "rows", flat(2))
    (rows / "agents/0/evaluations.csv").write_text(
        "step,return_mean,return_std,episodes,wall_seconds\n1,x,0,1,0\n"
    )
    setting = write_run(tmp_path, "setting", flat(3))
    (setting / "run.toml").write_text("[train]\nstepps = 3\n")
    said = reasons(toml, rows, setting)
    assert [sentence.partition(" is left out: ")[0] for sentence in said] == [
        str(toml),
        str(rows),
        str(setting),
    ]
    assert "run.toml is damaged" in said[0]
    assert "line 2 is not 5 numbers" in said[1]
    assert "stepps" in said[2]


def test_an_unreadable_file_is_a_reason_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, "run", flat(1))

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "Permission denied" in reasons(run)[0]


def test_a_run_is_finished_once_each_of_its_agents_was_evaluated_at_the_last_step(tmp_path: Path) -> None:
    behind = write_run(tmp_path, "behind", flat(1, 11), flat(1, 9))
    alone = write_run(tmp_path, "alone", flat(1, 11), agents=2)
    young = write_run(tmp_path, "young", flat(1, 5), steps=10_000)
    assert [sentence.partition("(")[2].partition(")")[0] for sentence in reasons(behind, alone, young)] == [
        "step 8,000 of 10,000",
        "1 of 2 agents have evaluations",
        "step 4,000 of 10,000",
    ]
    runs, left_out = read_runs([behind, alone, young], unfinished=True)
    assert left_out == []
    assert [run.finished for run in runs] == [False, False, False]
    assert [run.curve.step[-1] for run in runs] == [8_000, 10_000, 4_000]


def test_a_run_without_any_evaluation_is_left_out_even_with_unfinished(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", [1])
    (run / "agents/0/evaluations.csv").unlink()
    assert "no evaluation yet" in reasons(run, unfinished=True)[0]


def test_an_evaluation_that_is_not_finite_leaves_its_run_out(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", [0, 1, float("nan"), 2])
    assert "not finite" in reasons(run)[0]


def test_a_copy_is_no_second_sample_and_another_seed_with_the_same_numbers_is(tmp_path: Path) -> None:
    first = write_run(tmp_path, "first", flat(1), seed=0)
    copy = write_run(tmp_path, "copy", flat(1), seed=0)
    other = write_run(tmp_path, "other", flat(1), seed=1)
    again = write_run(tmp_path, "again", flat(2), seed=0)
    on_disk = write_run(tmp_path, "on-disk", flat(1), seed=0, settings={"replay": {"storage": "disk"}})
    runs, left_out = read_runs([first, copy, other, again, on_disk])
    assert [run.path for run in runs] == [first, other, again]
    assert "are those of" in str(left_out[0])
    assert [each.path for each in left_out] == [copy, on_disk]


def test_a_growing_file_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", flat(1, 3))
    write_curve(run, 0, flat(1, 4))
    with (run / "agents/0/evaluations.csv").open("a") as file:
        file.write("4000,2.")
    assert read_runs([run])[0][0].curve.step.tolist() == [0, 1000, 2000, 3000]


def test_evaluations_too_large_for_statistics_are_a_reason(tmp_path: Path) -> None:
    large = write_run(tmp_path, "large", flat(1e101))
    overflowing = write_run(tmp_path, "overflowing", flat(1.7e308), flat(1.7e308))
    assert "beyond 1e+100" in reasons(large)[0]
    assert "beyond 1e+100" in reasons(overflowing)[0]


def test_a_folder_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "run", flat(1))
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("hidden-from-us"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    (tmp_path / "hidden-from-us").mkdir()
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RunDirectoryError, match=r"cannot read .*hidden-from-us: Permission denied"):
        find_runs([tmp_path])
