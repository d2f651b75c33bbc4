"""The verification of a run's files: what is damaged, and from where the run can be resumed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dase_grpc.errors import DaseError, RunDirectoryError
from dase_grpc.progress import several
from dase_grpc.runs.checkpoint import Checkpoint, load_checkpoint, newest_sound
from dase_grpc.runs.directory import (
    IN_ROUNDS,
    RUN_FILE,
    AgentDirectory,
    RunDirectory,
    checkpoint_paths,
    round_paths,
)
from dase_grpc.runs.files import unfinished_line, whole_lines
from dase_grpc.runs.logs import COLUMNS, read_evaluations, read_metrics, read_restarts, read_scores
from dase_grpc.runs.lookup import require_run
from dase_grpc.runs.rewind import require_same_settings
from dase_grpc.runs.rounds import Round, Segment, newest_whole_round


@dataclass(frozen=True)
class Finding:
    """One file or folder of a run: what it holds, and what is wrong with it, if anything is."""

    path: Path
    content: str
    problem: str | None = None


@dataclass(frozen=True)
class Verification:
    """All findings, and from where the run can be resumed; None if from nowhere, with the reason."""

    findings: tuple[Finding, ...]
    resumable: str | None
    reason: str

    @property
    def damaged(self) -> list[Finding]:
        """What is wrong."""
        return [each for each in self.findings if each.problem is not None]


def verify(path: Path, *, kept_buffer: Callable[[Path], str | None] = lambda folder: None) -> Verification:
    """Checks a run; changes nothing.

    `kept_buffer` says what a replay's data directory holds, None where there is none there; it raises a
    DaseError where that is damaged.

    Raises:
        RunDirectoryError: there is no run.
    """
    require_run(path)
    try:
        run = RunDirectory.open(path)
    except RunDirectoryError as error:
        return Verification((Finding(path / RUN_FILE, "settings", str(error)),), None, str(error))
    settings = Finding(path / RUN_FILE, f"settings, {several(run.config.train.agents, 'agent')}")
    ids = range(run.config.train.agents)
    agents = [finding for agent_id in ids for finding in _of_agent(run, run.agent(agent_id))]
    strays = [Finding(path, "", _no_agent_of(run, path)) for path in run.strays()]
    kept = _checked(run.replay, lambda: kept_buffer(run.replay) or "")
    buffer = [kept] if kept.content or kept.problem else []
    restarts = [_checked(run.restarts, partial(_restarts, run))] if run.restarts.exists() else []
    scores = [_checked(run.scores, partial(_scores, run))] if run.scores.exists() else []
    findings = (settings, *agents, *strays, *_of_buffer(run), *buffer, *restarts, *scores)
    try:
        return Verification(findings, _resumable(run, buffer), "")
    except DaseError as error:
        return Verification(findings, None, str(error))


def _resumable(run: RunDirectory, buffer: Sequence[Finding]) -> str:
    if run.mode in IN_ROUNDS:
        whole_round = newest_whole_round(run)
        _require_settings(run, whole_round.checkpoints)
        steps = sorted(set(whole_round.round.steps))
        return f"all agents and the buffer from step {', '.join(f'{step:,}' for step in steps)}"
    found = {agent: newest_sound(run.agent(agent).checkpoints)[0] for agent in range(run.config.train.agents)}
    if not any(found.values()):
        raise RunDirectoryError(f"no agent of {run.path} has a checkpoint that is whole")
    _require_settings(run, filter(None, found.values()))
    whole = [
        f"agent {agent} anew, since it has no whole checkpoint"
        if each is None
        else f"agent {agent} from step {each.step:,}"
        for agent, each in found.items()
    ]
    if not buffer:
        return f"{', '.join(whole)}; the buffer is not kept, so only with --empty-buffer"
    if buffer[0].problem is not None:
        return f"{', '.join(whole)}; the buffer is damaged, so only with --empty-buffer"
    return f"{', '.join(whole)}; the {buffer[0].content}"


def _require_settings(run: RunDirectory, checkpoints: Iterable[Checkpoint]) -> None:
    """As `dase resume` checks what it would go on from."""
    for each in checkpoints:
        require_same_settings(each.run_config, run.config, of=str(each))


def _of_agent(run: RunDirectory, agent: AgentDirectory) -> Iterator[Finding]:
    if agent.path.exists() and not agent.path.is_dir():
        yield Finding(agent.path, "", f"{agent.path} is damaged: it is no folder")
        return
    yield _checked(agent.evaluations.path, lambda: _evaluations(agent))
    yield _checked(agent.metrics.path, lambda: _metrics(agent))
    for path in checkpoint_paths(agent.checkpoints).values():
        yield _checked(path, partial(_checkpoint, run, agent, path))


def _no_agent_of(run: RunDirectory, path: Path) -> str:
    last = run.config.train.agents - 1
    ids = f"agents are 0..{last}" if last else "agent is 0"
    return f"{path} is no agent's of this run, whose {ids}, so nothing reads it; move it away"


def _of_buffer(run: RunDirectory) -> Iterator[Finding]:
    segments: dict[Segment, None] = {}
    for path in round_paths(run.replay).values():
        yield _checked(path, partial(_round, path, segments))
    for segment in segments:
        yield _checked(run.replay / segment.name, partial(_segment, run.replay, segment))
    for path in run.replay.glob("buffer.npy"):
        yield _checked(path, partial(_array, path))


def _checked(path: Path, read: Callable[[], str]) -> Finding:
    try:
        return Finding(path, read())
    except DaseError as error:
        return Finding(path, "", str(error))


def _scores(run: RunDirectory) -> str:
    return several(len(read_scores(run.scores)), "score")


def _restarts(run: RunDirectory) -> str:
    return f"{several(len(read_restarts(run.restarts)), 'failure')} of nodes"


def _metrics(agent: AgentDirectory) -> str:
    path = agent.metrics.path
    return f"{several(len(read_metrics(path)), 'line')}{_unfinished(path, begins='{')}"


def _unfinished(path: Path, *, begins: str) -> str:
    """What is said of a last line without an end, which a killed writer leaves."""
    if path.exists() and not path.is_file():
        raise RunDirectoryError(f"{path} is damaged: it is no file")
    rest = unfinished_line(path)
    if rest and not whole_lines(path) and not (begins.startswith(rest) or rest.startswith(begins)):
        raise RunDirectoryError(f"{path} is damaged: it does not begin as it should")
    return " and one that is not finished" if rest else ""


def _evaluations(agent: AgentDirectory) -> str:
    steps = read_evaluations(agent.evaluations.path).step
    if len(steps) and (np.diff(steps) <= 0).any():
        twice = int(steps[1:][np.diff(steps) <= 0][0])
        raise RunDirectoryError(
            f"{agent.evaluations.path} is damaged: step {twice} does not follow a lower one"
        )
    unfinished = _unfinished(agent.evaluations.path, begins=",".join(COLUMNS))
    return f"{several(len(steps), 'evaluation')}{unfinished}"


def _checkpoint(run: RunDirectory, agent: AgentDirectory, path: Path) -> str:
    checkpoint = load_checkpoint(path)
    if (checkpoint.agent_id, checkpoint.step) != (agent.agent_id, int(path.name.removeprefix("step-"))):
        raise RunDirectoryError(
            f"{path} is that of agent {checkpoint.agent_id} after {several(checkpoint.step, 'step')}, "
            f"so it lies wrong"
        )
    _require_settings(run, [checkpoint])
    return f"checkpoint, {len(checkpoint.tensors) + len(checkpoint.training_tensors)} tensors"


def _round(path: Path, segments: dict[Segment, None]) -> str:
    """Describes a round; adds its files to `segments`."""
    found = Round.read(path)
    segments.update(dict.fromkeys(found.segments))
    return (
        f"round, {several(found.total - found.first, 'transition')} in {several(len(found.segments), 'file')}"
    )


def _segment(folder: Path, segment: Segment) -> str:
    return f"{several(len(segment.read(folder)), 'transition')}"


def _array(path: Path) -> str:
    try:
        rows = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a header is Python, of which NumPy lets out what its parser raises
        raise RunDirectoryError(f"{path} is damaged: it is no array of NumPy ({error})") from error
    if rows.ndim != 2:
        raise RunDirectoryError(f"{path} is damaged: it holds no rows")
    return several(len(rows), "transition")
