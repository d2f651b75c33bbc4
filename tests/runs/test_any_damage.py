"""Whatever stands in a run's files, reading them ends well or in an error of ours, and never in another."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import write_run

from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.texts import json_value, toml_tables
from dase_grpc.errors import DaseError, RunDirectoryError
from dase_grpc.progress import duration
from dase_grpc.replay.buffer.directory import BUFFER, SETTINGS, note_settings, stored_identity
from dase_grpc.runs.checkpoint import load_checkpoint
from dase_grpc.runs.curves import AgentFiles, column, peers_of, recent, recent_weights, refused, status
from dase_grpc.runs.directory import AgentDirectory, RunDirectory
from dase_grpc.runs.logs import COLUMNS, MetricsLog, Restart, Score, read_restarts, read_scores, told
from dase_grpc.runs.rewind import rewind
from dase_grpc.runs.rounds import Round
from dase_grpc.runs.verify import verify

RECORD = {
    "step": 100,
    "wall_seconds": 1.5,
    "critic_loss": 0.5,
    "refused": {"reward": 1},
    "env_restarts": {"step": 1},
    "similarity": {"1": 0.5},
    "divergence_mean_by_source": {"1": None},
}
RESTART = {"time": "", "node": "replay", "why": "x", "from_step": 1, "pause_s": 1.0}
SCORE = {
    "policy": "best",
    "agent": 0,
    "step": 1,
    "seed": 1,
    "episodes": 1,
    "return_mean": 1.0,
    "return_std": 0.0,
}
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([-1, 10**400, 1e308, float("inf"), 2**53]))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner)),
    max_leaves=5,
)
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def changed(sound: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A sound line of which one value is another, and after it the sound one."""
    entries = st.tuples(st.sampled_from([*sound, "new"]), JSON)
    lines = entries.map(lambda entry: json.dumps({**sound, entry[0]: entry[1]}))
    return lines.map(lambda line: f"{line}\n{json.dumps(sound)}\n".encode())


def read_agent(folder: Path) -> None:
    """All that a report computes of an agent's files."""
    files = AgentFiles.read(AgentDirectory(folder))
    status(RunDirectory(folder, RunConfig(), {"mode": "lockstep"}, {}), {0: files})
    assert duration(files.seconds)
    assert refused([files]).total() >= 0
    for key in ("wall_seconds", "critic_loss"):
        recent(column(files.records, key))
    peers_of(0, files.records, "divergence_mean_by_source")
    recent_weights({0: files.records})


@few
@given(st.one_of(st.binary(), changed(RECORD)))
def test_any_metrics(tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "0"
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(data)
    with suppress(DaseError):
        read_agent(folder)
    rewind(AgentDirectory(folder), None)


@few
@given(
    st.one_of(
        st.binary().map(lambda data: data + b"\n"),
        st.lists(st.one_of(NUMBERS, st.text(max_size=4)), min_size=5, max_size=5).map(
            lambda row: f"{','.join(map(str, row))}\n".encode(errors="replace")
        ),
    )
)
def test_any_evaluations(tmp_path: Path, line: bytes) -> None:
    folder = tmp_path / "0"
    folder.mkdir(exist_ok=True)
    (folder / "evaluations.csv").write_bytes(f"{','.join(COLUMNS)}\n".encode() + line)
    with suppress(DaseError):
        read_agent(folder)
    rewind(AgentDirectory(folder), None)


@few
@given(st.one_of(st.binary(), changed(RESTART)), st.one_of(st.binary(), changed(SCORE)))
def test_any_restarts_and_scores(tmp_path: Path, restarts: bytes, scores: bytes) -> None:
    (tmp_path / "restarts.jsonl").write_bytes(restarts)
    (tmp_path / "scores.jsonl").write_bytes(scores)
    with suppress(DaseError):
        told(read_restarts(tmp_path / "restarts.jsonl"))
    with suppress(DaseError):
        for score in read_scores(tmp_path / "scores.jsonl"):
            f"{score.return_mean:.1f} {score.return_std:.1f} {score.step:,}"


@few
@given(st.one_of(st.binary(), JSON.map(json.dumps).map(str.encode)))
def test_any_documents(tmp_path: Path, data: bytes) -> None:
    for name in ("checkpoint.json", "round.json", "run.toml", BUFFER, SETTINGS):
        (tmp_path / name).write_bytes(data)
    readers = (
        lambda: load_checkpoint(tmp_path),
        lambda: Round.read(tmp_path / "round.json"),
        lambda: RunDirectory.open(tmp_path),
        lambda: stored_identity(tmp_path),
    )
    for read in readers:
        with suppress(DaseError):
            read()
    note_settings(tmp_path, {"capacity": 1.0})


@few
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=100).map(b"\x93NUMPY\x01\x00v\x00".__add__)))
def test_any_rows_at_the_end_of_a_run(tmp_path: Path, data: bytes) -> None:
    run = tmp_path / "run"
    if not run.exists():
        write_run(tmp_path, "run", [1.0, 2.0])
        (run / "replay").mkdir()
    (run / "replay" / "buffer.npy").write_bytes(data)
    assert [each.path.name for each in verify(run).damaged] == ["buffer.npy"]


@pytest.mark.parametrize("depth", [101, 400, 990, 100_000])
@pytest.mark.parametrize("name", ["checkpoint.json", "round.json", BUFFER])
def test_a_deeply_nested_document_is_damaged(tmp_path: Path, name: str, depth: int) -> None:
    (tmp_path / name).write_text(f'{{"format": 1, "check_sum": {"[" * depth}{"]" * depth}}}')
    read = {BUFFER: stored_identity, "checkpoint.json": load_checkpoint}.get(
        name, lambda path: Round.read(path / name)
    )
    with pytest.raises(DaseError, match="is damaged"):
        read(tmp_path)


@pytest.mark.parametrize("key", [".".join("a" * 3_000), f"[{'.'.join('a' * 3_000)}]\nb"])
def test_a_key_of_thousands_of_parts_is_nested_too_deeply(key: str) -> None:
    with pytest.raises(ValueError, match="it is nested too deeply"):
        toml_tables(f"{key} = 1")
    assert json_value("[" * 100 + "]" * 100)


def test_a_note_of_resumptions_that_is_no_list_is_damage(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run", [1.0])
    (run / "run.toml").write_text((run / "run.toml").read_text().replace("[run]", "[run]\nresumed = 5"))
    with pytest.raises(
        RunDirectoryError, match=r"run\.toml is damaged: resumed in its table \[run\] is no list"
    ):
        RunDirectory.open(run)


def test_the_sound_lines_that_are_changed_here_are_sound(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "0" / "metrics.jsonl").append(RECORD)
    assert AgentFiles.read(AgentDirectory(tmp_path / "0")).records == [RECORD]
    for name, read, line, kind in (
        ("restarts.jsonl", read_restarts, RESTART, Restart),
        ("scores.jsonl", read_scores, SCORE, Score),
    ):
        (tmp_path / name).write_text(f"{json.dumps(line)}\n")
        assert read(tmp_path / name) == [kind(**line)]
