"""An agent's files are taken back to a checkpoint; what was written after it is put aside."""

import errno
from pathlib import Path

import pytest

from dase_grpc.errors import DiskFullError
from dase_grpc.runs.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from dase_grpc.runs.directory import AgentDirectory
from dase_grpc.runs.logs import read_evaluations, read_metrics
from dase_grpc.runs.rewind import rewind


@pytest.fixture
def agent(tmp_path: Path) -> AgentDirectory:
    """Evaluated every 10 steps and logged every 5, until step 40; a checkpoint every 10, and at 25."""
    directory = AgentDirectory(tmp_path / "0")
    for step in range(0, 41, 5):
        if step % 10 == 0:
            directory.evaluations.append(
                step=step, return_mean=1.5, return_std=0.5, episodes=2, wall_seconds=step / 10
            )
        if step:
            directory.metrics.append({"step": step, "wall_seconds": step / 10 + 0.01})
    for step in (10, 20, 25, 30, 40):
        due = step // 10 * 10
        keep(directory, step, evaluated=due, logged=step)
    return directory


def keep(directory: AgentDirectory, step: int, **counters: int) -> Path:
    training = {"counters": counters}
    return save_checkpoint(
        directory.checkpoints, step=step, tensors={}, metadata={"training": training}, keep=9
    )


def at(agent: AgentDirectory, step: int):
    return load_checkpoint(agent.checkpoints / f"step-{step:09d}")


def written(path: Path) -> tuple[int, int]:
    """Which file it is, and when it was written."""
    return path.stat().st_ino, path.stat().st_mtime_ns


def steps_of(folder: Path):
    evaluated = read_evaluations(folder / "evaluations.csv").step.tolist()
    return evaluated, [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


def test_what_came_after_the_checkpoint_is_put_aside_and_nothing_is_lost(agent):
    rewound = rewind(agent, at(agent, 25))
    assert steps_of(agent.path) == ([0, 10, 20], [5, 10, 15, 20, 25])
    assert steps_of(agent.path / "before-resume-1") == ([30, 40], [30, 35, 40])
    assert [path.name[-2:] for path in checkpoints(agent.checkpoints)] == ["10", "20", "25"]
    assert [path.name[-2:] for path in checkpoints(rewound.aside / "checkpoints")] == ["30", "40"]
    assert (rewound.lines, rewound.checkpoints) == (5, 2)
    assert rewound.elapsed_s == 2.51


def test_a_line_at_the_checkpoints_own_step_goes_where_it_was_not_due(agent):
    keep(agent, 40, evaluated=30, logged=35)
    rewound = rewind(agent, at(agent, 40))
    assert steps_of(agent.path) == ([0, 10, 20, 30], [5, 10, 15, 20, 25, 30, 35])
    assert rewound.elapsed_s == 4.01


def test_where_nothing_came_after_nothing_is_touched(agent):
    before = written(agent.evaluations.path)
    rewound = rewind(agent, at(agent, 40))
    assert (rewound.aside, rewound.lines, rewound.checkpoints) == (None, 0, 0)
    assert written(agent.evaluations.path) == before


def test_to_rewind_twice_changes_nothing_more_and_each_time_has_its_folder(agent):
    first = rewind(agent, at(agent, 30))
    assert rewind(agent, at(agent, 30)).aside is None
    second = rewind(agent, at(agent, 20))
    assert [first.aside.name, second.aside.name] == ["before-resume-1", "before-resume-2"]
    assert steps_of(second.aside) == ([30], [25, 30])


def test_an_agent_without_a_checkpoint_is_taken_back_to_nothing(agent):
    rewound = rewind(agent, None)
    assert (len(read_evaluations(agent.evaluations.path)), read_metrics(agent.metrics.path)) == (0, [])
    assert rewound.elapsed_s == 0
    assert rewind(AgentDirectory(agent.path.parent / "1"), None).aside is None


def test_damaged_lines_are_put_aside_as_they_are(agent):
    agent.evaluations.path.write_bytes(b"20,1,2\n" + agent.evaluations.path.read_bytes() + b"\xff\xfe\n50,to")
    rewind(agent, at(agent, 40))
    assert steps_of(agent.path)[0] == [0, 10, 20, 30, 40]
    put_aside = (agent.path / "before-resume-1" / "evaluations.csv").read_bytes().splitlines()
    assert put_aside[1:] == [b"20,1,2", put_aside[0], b"\xff\xfe"]


def test_a_disk_that_refuses_is_one_sentence(agent, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = steps_of(agent.path)
    monkeypatch.setattr("dase_grpc.runs.rewind.replace_file", full)
    with pytest.raises(
        DiskFullError, match=r"cannot rewind .*nothing is lost: No space left on device; free"
    ):
        rewind(agent, at(agent, 20))
    assert steps_of(agent.path) == before


def test_evaluations_that_another_writes_stay_as_they_are(agent: AgentDirectory):
    before = agent.evaluations.path.read_bytes()
    rewound = rewind(agent, at(agent, 20), evaluations=False)
    assert agent.evaluations.path.read_bytes() == before
    assert [each["step"] for each in read_metrics(agent.metrics.path)] == [5, 10, 15, 20]
    assert (rewound.elapsed_s, rewound.lines) == (2.01, 4)


def test_what_a_spreadsheet_has_saved_is_no_damage(agent):
    path = agent.evaluations.path
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    rewound = rewind(agent, at(agent, 25))
    assert (rewound.lines, rewound.damaged) == (5, 0)
    assert steps_of(agent.path)[0] == [0, 10, 20]
    assert steps_of(rewound.aside)[0] == [30, 40]


def test_damaged_lines_are_told_from_those_that_came_later(agent):
    path = agent.evaluations.path
    path.write_bytes(path.read_bytes().replace(b",", b";"))
    rewound = rewind(agent, at(agent, 40))
    assert rewound.counted == "lines: 6, 6 of them damaged, checkpoints: 0"
    assert rewind(agent, at(agent, 25)).counted == "lines: 3, checkpoints: 2"
