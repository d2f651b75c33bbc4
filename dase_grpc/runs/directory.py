"""One run on disk: where everything lies, and run.toml, which says what was run, and by what.

run.toml                     the resolved configuration, [run] and [versions]
agents/<i>/evaluations.csv   metrics.jsonl   checkpoints/   tensorboard/
logs/  replay/               restarts.jsonl   scores.jsonl   report.html
"""

import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Self

import tomli_w

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.config.texts import PLAIN_FOLDER, names_a_folder, shown, toml_file
from dase_grpc.errors import ConfigError, RunDirectoryError
from dase_grpc.runs.files import (
    STAGING_PREFIX,
    disk_refusal,
    reading,
    replace_file,
    staged_directory,
    utf8,
    write_synced,
    written,
)
from dase_grpc.runs.logs import EvaluationsFile, MetricsLog
from dase_grpc.seeding import Purpose, integer

RUN_FILE: Final = "run.toml"
CHECKPOINT_FILE: Final = "checkpoint.json"
IN_ROUNDS: Final = ("lockstep", "stack")
"""The modes of runs in one process, which keep whole rounds (rounds.py)."""

EVALUATOR_MODE: Final = "evaluator"
"""The mode of a run directory that an evaluator node has made, for what it writes alone."""

MODES: Final = ("cluster", *IN_ROUNDS, "node", EVALUATOR_MODE)

DISTRIBUTIONS: Final = {
    "dase": "dase-grpc",
    "torch": "torch",
    "numpy": "numpy",
    "gymnasium": "gymnasium",
    "mujoco": "mujoco",
    "grpc": "grpcio",
}
_CHECKOUT: Final = Path(__file__).resolve().parents[2]
_GIT_TIMEOUT_S: Final = 5
_ADDED_TABLES: Final = ("run", "versions")
_CHECKPOINT: Final = re.compile(r"step-(\d{9,})")
_REPLACED: Final = f"{STAGING_PREFIX}replaced-"
_ROUND: Final = re.compile(r"round-(\d{9,})\.json")


@dataclass(frozen=True)
class AgentDirectory:
    """The files of one agent; none of them has to exist."""

    path: Path

    @property
    def agent_id(self) -> int:
        """The agent this directory belongs to."""
        return int(self.path.name)

    @property
    def evaluations(self) -> EvaluationsFile:
        """evaluations.csv."""
        return EvaluationsFile(self.path / "evaluations.csv")

    @property
    def metrics(self) -> MetricsLog:
        """metrics.jsonl."""
        return MetricsLog(self.path / "metrics.jsonl")

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, one directory each."""
        return self.path / "checkpoints"

    @property
    def evaluator(self) -> Path:
        """The folder of an evaluator node: the best policy, as a checkpoint that cannot be resumed from."""
        return self.path / "evaluator"

    @property
    def lease_note(self) -> Path:
        """By which process the agent's lease is held (lease_note.py)."""
        return self.path / "lease.json"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files."""
        return self.path / "tensorboard"


def agent_directory(run: Path, agent_id: int) -> AgentDirectory:
    """The files of one agent of the run at a path, whether there yet or not."""
    return AgentDirectory(run / "agents" / str(agent_id))


@dataclass(frozen=True)
class RunDirectory:
    """A run on disk, with what its run.toml says.

    Attributes:
        path: the directory.
        config: the resolved configuration.
        run: the [run] table: name, created (UTC), mode, command, and the derived seeds.
        versions: the [versions] table.
    """

    path: Path
    config: RunConfig
    run: dict[str, Any]
    versions: dict[str, str]

    @classmethod
    def create(
        cls,
        root: Path,
        name: str,
        config: RunConfig,
        *,
        mode: str,
        command: Sequence[str] = (),
        created: datetime | None = None,
    ) -> Self:
        """Makes `root/name` with its run.toml in one step: other processes see all of it or nothing.

        Raises:
            RunDirectoryError: the name is no folder name, the directory exists and is not empty,
                or it cannot be written.
        """
        if not names_a_folder(name):
            raise RunDirectoryError(f"{name!r} cannot name a run; {PLAIN_FOLDER}")
        run = {
            "name": name,
            "created": (created or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds"),
            "mode": mode,
            "command": utf8(shlex.join(command)).decode(),
            "seeds": derived_seeds(config),
        }
        path = root / name
        try:
            with staged_directory(path) as staged:
                write_synced(staged / RUN_FILE, _toml(config, run, versions()))
        except OSError as error:
            if path.is_dir() and any(path.iterdir()):
                raise RunDirectoryError(
                    f"{path} exists and is not empty; choose another name or remove it"
                ) from None
            raise disk_refusal(f"cannot make the run directory {path}", error) from None
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads an existing run.

        Raises:
            RunDirectoryError: there is no run, or run.toml is damaged or of another version.
        """
        file = path / RUN_FILE
        try:
            with reading(file):
                if not file.exists():
                    raise RunDirectoryError(f"{path} is not a run: it has no {RUN_FILE}")
                tables = toml_file(file)
        except ValueError as error:
            raise RunDirectoryError(f"{file} is damaged: {error}") from None
        run, found = (tables.pop(name, {}) for name in _ADDED_TABLES)
        if not tables or not isinstance(run, dict) or not isinstance(found, dict):
            raise RunDirectoryError(f"{file} is damaged: it holds no configuration of a run")
        if not isinstance(run.get("resumed", []), list):
            raise RunDirectoryError(f"{file} is damaged: resumed in its table [run] is no list")
        try:
            config = resolve(tables)
        except ConfigError as error:
            raise RunDirectoryError(f"{file} is damaged or of another version: {error}") from None
        return cls(path, config, run, {key: str(value) for key, value in found.items()})

    @classmethod
    def ensure(
        cls, root: Path, name: str, config: RunConfig, *, mode: str, command: Sequence[str] = ()
    ) -> Self:
        """Opens `root/name`, or makes it; for learners that start on their own, all at the same time.

        The first one makes the run; the others find it and must bring the same configuration.

        Raises:
            RunDirectoryError: as `create`, or the run there has another configuration.
        """
        if not (root / name / RUN_FILE).exists():
            try:
                return cls.create(root, name, config, mode=mode, command=command)
            except RunDirectoryError:
                if not (root / name / RUN_FILE).exists():
                    raise
        existing = cls.open(root / name)
        if existing.config != config:
            raise RunDirectoryError(
                f"{existing.path} is a run with another configuration "
                f"({first_difference(existing.config, config)}); choose another name"
            )
        return existing

    def resumed(self, config: RunConfig, *, from_steps: Sequence[int], command: Sequence[str]) -> Self:
        """Notes in run.toml that the run goes on, with `config`; returns the run as it is then.

        from_steps are the environment steps that each agent has done, by id. The file is replaced at once.
        """
        entry: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "from_steps": list(from_steps),
            "to_steps": config.train.steps,
            "command": shlex.join(command),
            "versions": {key: value for key, value in versions().items() if self.versions.get(key) != value},
        }
        run = {**self.run, "resumed": [*self.run.get("resumed", []), entry]}
        with written(self.path / RUN_FILE):
            replace_file(self.path / RUN_FILE, _toml(config, run, self.versions))
        return self.open(self.path)

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.run.get("name", self.path.name))

    @property
    def mode(self) -> str:
        """How it was begun, one of `MODES`; a RunDirectoryError where its run.toml does not say."""
        mode = self.run.get("mode")
        if mode in MODES:
            return str(mode)
        raise RunDirectoryError(
            f"{self.path / RUN_FILE} does not say how the run was begun (mode in [run]: {shown(mode)}); put "
            f"back which of {', '.join(MODES)} it was"
        )

    @property
    def logs(self) -> Path:
        """Where the nodes of a local cluster write their output."""
        return self.path / "logs"

    @property
    def replay(self) -> Path:
        """Where the replay node keeps the buffer, if it keeps one on disk."""
        return self.path / "replay"

    @property
    def restarts(self) -> Path:
        """What the launcher of a local cluster notes of nodes that failed."""
        return self.path / "restarts.jsonl"

    @property
    def scores(self) -> Path:
        """What `dase evaluate` notes of policies of all agents together."""
        return self.path / "scores.jsonl"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    @property
    def how_to_begin_anew(self) -> str:
        """What to do instead of going on with it."""
        mode = self.run.get("mode")
        flag = f" --{mode}" if mode in IN_ROUNDS else ""
        return f"begin anew with dase train --config {shlex.quote(str(self.path / RUN_FILE))}{flag}"

    def agent(self, agent_id: int) -> AgentDirectory:
        """The files of one agent, whether there yet or not."""
        return agent_directory(self.path, agent_id)

    def agents(self) -> list[AgentDirectory]:
        """The agents of the run that have a directory, by id."""
        found = map(self.agent, range(self.config.train.agents))
        return [agent for agent in found if agent.path.is_dir()]

    def strays(self) -> list[Path]:
        """Folders beside those of the agents that have a number for a name and are no agent's of the run."""
        own = {self.agent(agent_id).path for agent_id in range(self.config.train.agents)}
        found = (self.path / "agents").glob("*")
        return sorted(path for path in found if path.name.isdecimal() and path not in own)


def versions() -> dict[str, str]:
    """The versions of this project, Python and the libraries that decide numbers; none is imported."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    revision = git_revision(_CHECKOUT)
    return {**found, "git": revision} if revision else found


def git_revision(checkout: Path) -> str | None:
    """The commit of the project's checkout, with `-dirty` where files differ from it; else None.

    An installed package lies in no checkout of its own, so nothing above `checkout` is asked.
    """
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():
        return None
    command = [git, "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def derived_seeds(config: RunConfig) -> dict[str, Any]:
    """The integer seeds that training derives from train.seed; lists go by agent id.

    Exploring and sampling draw from NumPy's generators, which have no such number. Each exploring
    episode has a seed of its own; `environment` lists those of the first ones.
    """
    seed, agents = config.train.seed, range(config.train.agents)
    return {
        "evaluation": integer(seed, Purpose.EVALUATION),
        "networks": [integer(seed, Purpose.NETWORKS, agent) for agent in agents],
        "environment": [integer(seed, Purpose.ENVIRONMENT, agent, 0) for agent in agents],
        "target_noise": [integer(seed, Purpose.TARGET_NOISE, agent) for agent in agents],
    }


def checkpoint_paths(folder: Path) -> dict[int, Path]:
    """The finished checkpoints in a folder by their steps, ascending; none if there is no folder.

    One that was moved aside for another, which did not come because its writer was killed, is among them.
    """
    aside = {step: path for path, target in replaced_paths(folder) if (step := _step(target)) is not None}
    found = {step: path for path in folder.glob("step-*") if (step := _step(path)) is not None}
    return {step: path for step, path in sorted({**aside, **found}.items()) if path.is_dir()}


def replaced_paths(folder: Path) -> list[tuple[Path, Path]]:
    """Where checkpoints lie that were moved aside for others of the same step, and where they lay before."""
    found = folder.glob(f"{_REPLACED}*")
    return [(path, path.with_name(path.name.removeprefix(_REPLACED))) for path in found]


def replaced_path(target: Path) -> Path:
    """Where a checkpoint lies while another takes its place."""
    return target.with_name(f"{_REPLACED}{target.name}")


def round_paths(folder: Path) -> dict[int, Path]:
    """The files of a lockstep run's rounds in a folder by their steps, ascending; none without a folder."""
    found = ((_ROUND.fullmatch(path.name), path) for path in folder.glob("round-*.json"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where a folder of checkpoints has that of a step."""
    return folder / f"step-{step:09d}"


def changed_settings(before: RunConfig, now: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Every setting in which two configurations differ, with both values."""
    pairs = _pairs(before.model_dump(mode="json"), now.model_dump(mode="json"))
    return (each for each in pairs if each[1] != each[2])


def first_difference(ours: RunConfig, theirs: RunConfig) -> str:
    """The first setting in which two configurations differ, `ours` being the one on disk."""
    for key, left, right in changed_settings(ours, theirs):
        return f"{key} is {left!r} there and {right!r} here" if "." in key else f"{key} differ"
    return "they differ"


def _pairs(before: Any, now: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict) and prefix.count(".") < 2:
        for key in dict.fromkeys((*before, *now)):
            yield from _pairs(before.get(key), now.get(key), f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), before, now


def _step(path: Path) -> int | None:
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None


def _toml(config: RunConfig, run: Mapping[str, Any], made_by: Mapping[str, str]) -> bytes:
    return tomli_w.dumps({**config.model_dump(mode="json"), "run": run, "versions": made_by}).encode()
