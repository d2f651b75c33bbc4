"""Checkpoints: atomic, checksummed, the same bytes for the same state."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dase_grpc.config.resolve import resolve
from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.checkpoint import (
    best,
    checkpoints,
    describe,
    latest,
    load_checkpoint,
    newest_sound,
    save_checkpoint,
)
from dase_grpc.runs.files import json_text, sealed, staged_directory
from dase_grpc.schema import TransitionSchema

CONFIG = resolve({"env": {"id": "worlds:PointGoal"}, "train": {"seed": 3}})
SCHEMA = TransitionSchema("worlds:PointGoal", 3, 2, (-1.0, 0.1), (1.0, 0.3))


def state() -> dict[str, Tensor]:
    return {
        "weight": torch.arange(6.0).reshape(2, 3),
        "transposed": torch.arange(6, dtype=torch.float64).reshape(2, 3).T,
        "step": torch.tensor(7.0),
        "count": torch.tensor([1, 2]),
        "random": torch.Generator().get_state(),
        "empty": torch.zeros(0),
    }


def save(directory: Path, step: int = 1000, **more: Any) -> Path:
    return save_checkpoint(
        directory, step=step, tensors=state(), metadata=describe(CONFIG, SCHEMA, agent_id=1, **more)
    )


def test_everything_comes_back_bit_by_bit(tmp_path: Path) -> None:
    found = load_checkpoint(save(tmp_path, evaluation=-1.5, exploration={"words": [2**80]}))
    assert (found.step, found.agent_id) == (1000, 1)
    assert found.config == CONFIG
    assert found.schema == SCHEMA
    assert found.schema.fingerprint == SCHEMA.fingerprint
    assert found.metadata["evaluation"] == -1.5
    assert found.metadata["exploration"] == {"words": [2**80]}
    assert found.tensors.keys() == state().keys()
    for name, tensor in state().items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_tensors_may_share_memory(tmp_path: Path) -> None:
    flat = torch.arange(8.0)
    tensors = {"all": flat, "part": flat[2:4], "again": flat.view(2, 4)}
    found = load_checkpoint(save_checkpoint(tmp_path, step=1, tensors=tensors, metadata={}))
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())


def test_the_same_state_is_the_same_bytes_whatever_the_order(tmp_path: Path) -> None:
    first = save(tmp_path / "a")
    backwards = dict(reversed(state().items()))
    second = save_checkpoint(
        tmp_path / "b", step=1000, tensors=backwards, metadata=describe(CONFIG, SCHEMA, agent_id=1)
    )
    for name in ("state.safetensors", "checkpoint.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    assert latest(tmp_path / "missing") is None
    for step in (1000, 3000, 2_000_000_000):
        save(tmp_path, step)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000003000", "step-2000000000"]
    assert latest(tmp_path) == tmp_path / "step-2000000000"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, evaluation=1)
    save(tmp_path, evaluation=2)
    assert load_checkpoint(tmp_path / "step-000001000").metadata["evaluation"] == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_the_checkpoint_that_was_to_be_replaced_and_nothing_that_killed_writers_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, evaluation=1)
    (tmp_path / ".staging-step-000002000-1-abcd").mkdir()

    def full(file: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dase_grpc.runs.checkpoint.write_synced", full)
    for step in (1000, 3000):
        with pytest.raises(RunDirectoryError, match="No space left on device"):
            save(tmp_path, step, evaluation=2)
        assert load_checkpoint(path).metadata["evaluation"] == 1
        assert [found.name for found in tmp_path.iterdir()] == [path.name]


class Killed(BaseException):
    """Ends a writer as SIGKILL does."""


@pytest.mark.parametrize(("renames", "evaluation"), [(0, 1), (1, 1), (2, 2)])
def test_a_writer_that_is_killed_while_it_replaces_a_checkpoint_leaves_the_old_one_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int, evaluation: int
) -> None:
    path, done, rename = save(tmp_path, evaluation=1), [], Path.rename

    def killed(self: Path, target: Path) -> Path:
        if len(done) == renames:
            raise Killed
        done.append(target)
        return rename(self, target)

    def killed_then(directory: Path, *, keep: int) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        patch.setattr("dase_grpc.runs.checkpoint._prune", killed_then)
        with pytest.raises(Killed):
            save(tmp_path, evaluation=2)
    (listed,) = checkpoints(tmp_path)
    assert load_checkpoint(listed).metadata["evaluation"] == evaluation
    found, passed_over = newest_sound(tmp_path)
    assert found is not None
    assert (found.step, passed_over) == (1000, [])
    save(tmp_path, 2000)
    assert load_checkpoint(path).metadata["evaluation"] == evaluation
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, "step-000002000"]


def test_what_a_killed_writer_left_is_never_seen_and_removed_by_the_next(tmp_path: Path) -> None:
    path = save(tmp_path)
    shutil.copytree(path, tmp_path / ".staging-step-000002000-1-abcd")
    assert latest(tmp_path) == path
    save(tmp_path, 3000)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["step-000001000", "step-000003000"]


def test_a_directory_that_fails_half_way_does_not_appear(tmp_path: Path) -> None:
    def write_half() -> None:
        with staged_directory(tmp_path / "target") as staged:
            (staged / "half").write_text("x")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("state.safetensors", "is damaged: its checksum does not match state.safetensors"),
        ("training.safetensors", "is damaged: its checksum does not match training.safetensors"),
        ("checkpoint.json", "is damaged: checkpoint.json does not have the checksum"),
    ],
)
def test_a_changed_byte_is_found(tmp_path: Path, name: str, said: str) -> None:
    file = save(tmp_path, evaluation=1234.5) / name
    data = file.read_bytes()
    last = bytes([data[-1] ^ 1])
    file.write_bytes(data.replace(b"1234.5", b"1234.6") if name.endswith("json") else data[:-1] + last)
    with pytest.raises(RunDirectoryError, match=said):
        load_checkpoint(file.parent)


def scored(directory: Path, step: int, score: float | None, *, at: int | None = None) -> Path:
    return save(directory, step, evaluation=score, evaluation_step=step if at is None else at)


def test_the_best_is_kept_besides_the_last_two_for_as_long_as_it_is_the_best(tmp_path: Path) -> None:
    assert best(tmp_path) is None
    for step, score in ((1, -5.0), (2, -1.0), (3, -3.0), (4, None), (5, -2.0), (6, -4.0)):
        scored(tmp_path, step, score)
    assert [int(path.name[5:]) for path in checkpoints(tmp_path)] == [2, 5, 6]
    assert best(tmp_path) == tmp_path / "step-000000002"
    scored(tmp_path, 7, -1.0)
    assert best(tmp_path) == tmp_path / "step-000000007"
    assert [int(path.name[5:]) for path in checkpoints(tmp_path)] == [6, 7]


def test_a_score_of_an_earlier_step_makes_no_checkpoint_the_best(tmp_path: Path) -> None:
    scored(tmp_path, 1, 5.0, at=0)
    assert best(tmp_path) is None


def test_a_checkpoint_that_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    path = save(tmp_path, evaluation=1)
    before = (path / "state.safetensors").stat()
    save(tmp_path, evaluation=1)
    after = (path / "state.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    (path / "state.safetensors").write_bytes(b"")
    save(tmp_path, evaluation=1)
    assert load_checkpoint(path).step == 1000


def test_the_newest_that_is_not_damaged_is_found_and_what_was_wrong_is_said(tmp_path: Path) -> None:
    assert newest_sound(tmp_path) == (None, [])
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-000000002" / "training.safetensors").unlink()
    found, passed_over = newest_sound(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(passed_over) == 1
    assert "cannot read" in passed_over[0]


def test_a_missing_piece_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"is not a checkpoint: it has no checkpoint\.json"):
        load_checkpoint(tmp_path / "nothing")
    path = save(tmp_path)
    (path / "state.safetensors").unlink()
    with pytest.raises(RunDirectoryError, match=r"cannot read .*state\.safetensors: No such file"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is damaged"),
        ("[]", "it is not a JSON object"),
        ('{"format_version": 99}', "has format 99, this version of dase reads format 2"),
    ],
)
def test_unreadable_metadata_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = save(tmp_path)
    (path / "checkpoint.json").write_text(text)
    with pytest.raises(RunDirectoryError, match=reason):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config": {"agent": {"nonsense": 1}}}, "of another version: unknown setting agent.nonsense"),
        ({"config": None}, r"has no config in its checkpoint\.json"),
        ({"schema": {"observation_size": 3}}, "has a damaged schema"),
        ({"agent_id": None}, "does not say whose state it is"),
    ],
)
def test_metadata_of_another_version_is_refused_when_it_is_asked_for(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = save(tmp_path)
    document = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json_text(sealed({**document, **change})))
    found = load_checkpoint(path)
    with pytest.raises(RunDirectoryError, match=reason):
        getattr(found, next(iter(change)))


def test_a_checkpoint_of_a_mixed_ensemble_has_its_agents_settings(tmp_path: Path) -> None:
    config = resolve({"members": [{"algorithm": "td3"}, {"algorithm": "sac"}]})
    paths = [
        save_checkpoint(
            tmp_path / str(agent_id),
            step=1,
            tensors=state(),
            metadata=describe(config, SCHEMA, agent_id=agent_id),
        )
        for agent_id in (1, 5)
    ]
    found, stranger = map(load_checkpoint, paths)
    assert found.run_config == config
    assert found.config.agent == config.members[1]
    with pytest.raises(RunDirectoryError, match="is of agent 5, which its run does not have"):
        _ = stranger.config


def test_a_disk_that_refuses_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot write the checkpoint"):
        save(tmp_path / "file")
