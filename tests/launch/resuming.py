"""Runs that are broken off and resumed, and what of their files has to be as without a break."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from small import SETTINGS, small_config

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.launch.lockstep import BUFFER_FILE, LockstepRun, open_lockstep, run_lockstep
from dase_grpc.launch.resume import ResumeOptions, resume_here
from dase_grpc.runs.checkpoint import METADATA_FILE, checkpoints
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.files import json_text, sealed
from dase_grpc.runs.logs import read_metrics
from dase_grpc.runs.rounds import ROWS, Round, read_rows, round_paths

MEASURED_TIME = {"wall_seconds", "updates_per_second", "steps_per_second"}
PERIODS = {"train__log_every": 20, "train__checkpoint_every": 30, "eval__every": 30}


def config(env: str = "worlds:PointGoal", **settings) -> RunConfig:
    """A run of 120 steps with a checkpoint every 30, in episodes of 20, whose buffer is full after 75."""
    return small_config(env, **{**PERIODS, "replay__capacity": 150, **settings})


MEMBERS = [
    {**SETTINGS["agent"], "algorithm": "td3"},
    {
        **SETTINGS["agent"],
        "algorithm": "sac",
        "hidden": [8],
        "reward_scale": 5.0,
        "normalise_observations": True,
    },
]


def mixed(method: str, *layers: dict) -> RunConfig:
    """A TD3 and a SAC agent that share experience (`dase`) or distil each other (`dpd`)."""
    common = {section: keys for section, keys in SETTINGS.items() if section != "agent"}
    return resolve(common, {"members": MEMBERS, "train": {"method": method}}, *layers)


def resumable(method: str) -> RunConfig:
    """The same with the periods of `config`."""
    periods = {"train": {"log_every": 20, "checkpoint_every": 30}, "eval": {"every": 30}}
    exchange = {"dpd": {"publish_every": 7}} if method == "dpd" else {}
    return mixed(method, periods, {"replay": {"capacity": 150}}, exchange)


CONFIGS = {
    "td3": config(),
    "ddpg": config(agent__algorithm="ddpg", agent__normalise_observations=True),
    "sac": config(agent__algorithm="sac"),
    "one agent": config(train__agents=1),
    "by agent": config(dps__scope="agent"),
    "remembered similarity": config(dps__memory=20.0),
    "one update behind": config(
        agent__algorithm="ddpg", agent__normalise_observations=True, train__overlap=True
    ),
    "a pair that distils": config(train__method="dpd", dpd__publish_every=7),
    "own share": config(replay__own_share=0.3),
    "priorities": config(
        replay__sampling="prioritised",
        replay__own_share=0.5,
        priorities__uniform_share=0.1,
        priorities__beta_final=0.4,  # as at the start: else it depends on the run's length
    ),
    "td3 and sac": resumable("dase"),
    "td3 and sac that distil": resumable("dpd"),
}


def nothing(opened: LockstepRun) -> None:
    """Does nothing after a round."""


def train(
    root: Path,
    settings: RunConfig,
    name: str = "run",
    *,
    on_round: Callable[[LockstepRun], None] = nothing,
    halt: threading.Event | None = None,
    mode: str = "lockstep",
) -> RunDirectory:
    """A run in one process from the start."""
    directory = RunDirectory.create(root, name, settings, mode=mode)
    with open_lockstep(settings, directory, stacked=mode == "stack") as opened:
        run_lockstep(opened, halt or threading.Event(), lambda: on_round(opened))
    return directory


def train_until(
    root: Path, settings: RunConfig, step: int, name: str = "run", *, mode: str = "lockstep"
) -> RunDirectory:
    """A run in one process that is stopped, as by SIGTERM, after a round."""
    halt = threading.Event()

    def on_round(opened: LockstepRun) -> None:
        if opened.progress[0].step == step or opened.learners[0].steps == step:
            halt.set()

    return train(root, settings, name, on_round=on_round, halt=halt, mode=mode)


class Killed(BaseException):
    """Ends a run as SIGKILL does: nothing more is written."""


def train_killed_after(
    root: Path, settings: RunConfig, step: int, name: str = "run", *, mode: str = "lockstep"
) -> RunDirectory:
    """A run in one process that is killed after a round."""

    def on_round(opened: LockstepRun) -> None:
        if opened.learners[0].steps == step:
            raise Killed

    try:
        return train(root, settings, name, on_round=on_round, mode=mode)
    except Killed:
        return RunDirectory.open(root / name)


def resume(directory: RunDirectory, steps: int | None = None) -> RunDirectory:
    """`dase resume`."""
    resume_here(ResumeOptions(directory.path, steps=steps))
    return RunDirectory.open(directory.path)


def assert_equal(straight: RunDirectory, resumed: RunDirectory, *, first_steps: int | None = None) -> None:
    """All that two runs have written is the same, to the last byte, but for times.

    `first_steps` was the budget of the second when it wrote its checkpoints up to there.
    """
    for agent in straight.agents():
        other = resumed.agent(agent.agent_id)
        assert curve(agent) == curve(other)
        assert records(agent) == records(other)
        names, others = ([path.name for path in checkpoints(each.checkpoints)] for each in (agent, other))
        assert names[-1] == others[-1]
        for name in {*names} & {*others}:
            first, second = (files(each.checkpoints / name) for each in (agent, other))
            if int(name.removeprefix("step-")) <= (first_steps or 0):
                second[METADATA_FILE] = with_steps(second[METADATA_FILE], straight.config.train.steps)
            assert first == second
    assert files(straight.replay, BUFFER_FILE) == files(resumed.replay, BUFFER_FILE)
    assert last_round(straight) == last_round(resumed)


def last_round(run: RunDirectory) -> tuple[Round, bytes]:
    """What the last round says but for how its rows are cut into files, and the rows."""
    *_, path = round_paths(run.replay).values()
    found = Round.read(path)
    rows = b"".join(rows.tobytes() for rows in read_rows(run.replay, found.segments, first=found.first))
    return replace(found, segments=()), rows


def with_steps(document: bytes, steps: int) -> bytes:
    """A checkpoint.json as it would be with another budget of steps."""
    values = json.loads(document)
    values["config"]["train"]["steps"] = steps
    return json_text(sealed(values)).encode()


def curve(agent) -> list[str]:
    """evaluations.csv without wall_seconds."""
    return [line.rpartition(",")[0] for line in agent.evaluations.path.read_text().splitlines()]


def records(agent) -> list[dict]:
    """metrics.jsonl without measured times."""
    read = read_metrics(agent.metrics.path)
    return [{key: value for key, value in record.items() if key not in MEASURED_TIME} for record in read]


def files(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """The files of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob(pattern)) if path.is_file()}


def rows_of(directory: RunDirectory) -> list[str]:
    """The names of the buffer's files."""
    return sorted(path.name for path in directory.replay.glob(ROWS))


def flip(path: Path) -> None:
    """Changes a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
