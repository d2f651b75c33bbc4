"""The public Python interface: `train` and `iterate` a run, `load` one, and its policies.

    import dase_grpc as dase

    run = dase.train(env="Hopper-v5", agents=2, steps=100_000, mode="lockstep")
    action = run.policy("best").act(observation)

What is here stays as it is from version to version; other modules may change.
"""

import html
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from dase_grpc.config import arguments
from dase_grpc.config.gpus import Gpus
from dase_grpc.config.presets import ALGORITHM, layered
from dase_grpc.config.resolve import RunConfig, dotted, setting_names, unknown_setting
from dase_grpc.errors import ConfigError, DivergedError, EnvironmentSpecError
from dase_grpc.inference.wire import not_finite, rows_of
from dase_grpc.launch.evaluate import Choice, EvaluatedCheckpoint, chosen_policy, evaluate_checkpoint
from dase_grpc.launch.events import (
    Began,
    Ended,
    Evaluated,
    Event,
    Kept,
    Stepped,
    Updated,
    followed,
    in_processes,
    in_rounds,
    unheard,
)
from dase_grpc.launch.train import TrainOptions
from dase_grpc.learning.envs.answers import SHOWN, ActionMap, kind, text, to_float32
from dase_grpc.learning.envs.explorer import Policy as Acting
from dase_grpc.learning.envs.flat import box_shape, raw_space
from dase_grpc.learning.envs.make import borrowed_env
from dase_grpc.progress import number, several
from dase_grpc.runs.checkpoint import Checkpoint
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import Evaluations, read_evaluations, read_metrics
from dase_grpc.runs.reports.report import write_report

__all__ = [
    "Began",
    "Ended",
    "Evaluated",
    "Event",
    "Kept",
    "Run",
    "Stepped",
    "TrainedPolicy",
    "Updated",
    "iterate",
    "load",
    "train",
]

Mode = Literal["processes", "lockstep", "stack"]
MODES: Final[tuple[str, ...]] = get_args(Mode)
Gpu = int | Sequence[int] | Literal["all"]
Env = str | Callable[..., Any] | Mapping[str, Any]

GIVEN: Final = "dase_given_env"
"""The module under which an environment is found that was given as a callable nobody could import."""


# -- training -----------------------------------------------------------------------------------------


def train(
    env: Env | None = None,
    *,
    agents: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    algo: str | None = None,
    method: str | None = None,
    preset: str | None = None,
    mode: Mode = "processes",
    runs: str | Path = "runs",
    name: str | None = None,
    gpu: Gpu | None = None,
    verbose: bool = True,
    **settings: Any,
) -> "Run":
    """Trains agents to their last step and returns the run.

    The names are those of `dase train`, and so are the defaults: without any, the quick start. Ctrl-C keeps a
    checkpoint of each agent and then raises KeyboardInterrupt.

    `env` is an id as on the command line, the section `env`, or a class or function that makes the
    environment; one that other processes cannot import needs a mode of one process. `mode` is "processes",
    one replay and a learner for each agent, "lockstep", all in this process and the same to the bit each
    time, or "stack", in this process and updated at once. `runs` and `name` say where the run's directory is
    made. `gpu` is a GPU's index, several, which learners in other processes take in turn, or "all"; None is
    the CPU. A `verbose` run in other processes prints what it says, one in this process what is odd about
    its settings.
    Further settings go by dotted names, as in `**{"agent.batch_size": 64}`, or by sections, as in
    `agent={"batch_size": 64}`.

    Raises:
        UsageError: in one sentence, before anything is made, where what was asked for cannot be done.
        DaseError: the run failed.
    """
    given = {"agents": agents, "steps": steps, "seed": seed, "algo": algo, "method": method, "preset": preset}
    place = {"mode": mode, "runs": runs, "name": name, "gpu": gpu, "verbose": verbose}
    path: Path | None = None
    for event in iterate(env, **given, **place, **settings):  # type: ignore[arg-type]  # as they were given
        if isinstance(event, Began):
            path = event.path
    assert path is not None
    return load(path)


def iterate(
    env: Env | None = None,
    *,
    agents: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    algo: str | None = None,
    method: str | None = None,
    preset: str | None = None,
    mode: Mode = "processes",
    runs: str | Path = "runs",
    name: str | None = None,
    gpu: Gpu | None = None,
    verbose: bool = False,
    **settings: Any,
) -> Iterator[Event]:
    """Trains as `train` does while its events are taken: `Began`, then what comes, and `Ended` last.

    A run in this process trains only while the next event is awaited. Leaving the loop, or closing the
    iterator, keeps a checkpoint of each agent and leaves no process; `Ended` does not come then.

    Raises:
        UsageError: at once, where the settings cannot be used; of the environment with the first event.
        DaseError: the run failed.
    """
    arguments.require_one_of("mode", mode, MODES)
    named: dict[str, Any] = {
        "train.agents": agents,
        "train.steps": steps,
        "train.seed": seed,
        ALGORITHM: algo,
    }
    if isinstance(env, Mapping):
        settings["env"] = env
    elif env is not None:
        named["env.id"] = _env_id(env, mode)
    given = {**named, **_by_name(settings)}
    config = layered(preset_name=preset, flags=given, method=method)
    options = TrainOptions(
        config,
        arguments.path("runs", runs),
        name=arguments.optional_text("name", name),
        gpus=None if gpu is None else Gpus.parse(gpu),
        lockstep=mode == "lockstep",
        stack=mode == "stack",
        command=["dase.train"],
    )
    said = print if verbose else unheard
    return (in_processes if mode == "processes" else in_rounds)(options, said)


def _by_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by `section.key`, whether they were given so or as a section's mapping."""
    known = setting_names()
    found = dict(dotted(settings, known))
    for name, value in found.items():
        if name not in known:
            raise ConfigError(unknown_setting(name, value, known))
    return found


def _env_id(env: str | Callable[..., Any], mode: Mode) -> str:
    """What names the environment: of a callable its path where it can be imported from there."""
    if isinstance(env, str):
        return env
    module, name = getattr(env, "__module__", None), getattr(env, "__qualname__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is env:
        return f"{module}:{name}"
    if mode == "processes":
        raise ConfigError(
            f"env = {name or env!r} cannot be imported by other processes; put it into a module and name it "
            f"as package.module:Name, or choose mode = 'lockstep' or 'stack'"
        )
    place = vars(sys.modules.setdefault(GIVEN, ModuleType(GIVEN)))
    stem = name if name.isidentifier() else "env"
    name = next(each for each in _numbered(stem) if place.get(each, env) is env)  # runs before keep theirs
    place[name] = env
    return f"{GIVEN}:{name}"


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{count}" for count in itertools.count(2))


# -- a run that is there ------------------------------------------------------------------------------


def load(path: str | Path) -> "Run":
    """The run in a directory.

    Raises:
        RunDirectoryError: there is none, or it is damaged.
    """
    return Run(arguments.path("path", path))


class Run:
    """A run on disk; everything is read when it is asked for, so one that is going on may be looked at."""

    def __init__(self, path: Path) -> None:
        self._directory = RunDirectory.open(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """Its directory."""
        return self._directory.path

    @property
    def config(self) -> RunConfig:
        """Every setting."""
        return self._directory.config

    @property
    def evaluations(self) -> dict[int, Evaluations]:
        """By agent: the columns step, return_mean, return_std, episodes and wall_seconds, (N,) each."""
        return {each.agent_id: read_evaluations(each.evaluations.path) for each in self._directory.agents()}

    @property
    def metrics(self) -> dict[int, dict[str, npt.NDArray[np.float64]]]:
        """By agent: the numbers of metrics.jsonl, (N,) each, NaN for what was not measured.

        What is told by agent or reason has their names behind a dot, as "similarity.1".
        """
        return {each.agent_id: _columns(read_metrics(each.metrics.path)) for each in self._directory.agents()}

    def frame(self, of: Literal["evaluations", "metrics"] = "evaluations") -> Any:
        """The evaluations or metrics of all agents as one pandas frame, with the column `agent`.

        Raises:
            ConfigError: pandas is not installed, or there is no such table.
        """
        arguments.require_one_of("of", of, ("evaluations", "metrics"))
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError("frames need pandas; install it with: pip install pandas") from None
        tables = self.metrics if of == "metrics" else {k: vars(v) for k, v in self.evaluations.items()}
        frames = [pandas.DataFrame({"agent": agent, **columns}) for agent, columns in tables.items()]
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()

    def policy(self, agent: int | Choice = 0) -> "TrainedPolicy":
        """The latest policy of an agent, of the best one, or that of all (`dase evaluate --agent`).

        Raises:
            RunDirectoryError: there is no checkpoint of it.
            EnvironmentSpecError: the environment is missing here, or has changed.
        """
        acting, checkpoint = chosen_policy(self.path, agent)
        return TrainedPolicy(acting, checkpoint)

    def evaluate(
        self, episodes: int = 10, *, agent: int | Choice | None = None, seed: int | None = None
    ) -> list[EvaluatedCheckpoint]:
        """Plays episodes without noise: of each agent, of one, of the best or of all together.

        Raises:
            UsageError: as `dase evaluate` refuses.
        """
        return evaluate_checkpoint(self.path, episodes, agent=agent, seed=seed)

    def report(self) -> Path:
        """Writes report.html and returns its path."""
        return write_report(self._directory)

    def resume(self, steps: int | None = None, *, verbose: bool = True) -> "Run":
        """Goes on to the run's last step, or to a new total of each agent, in other processes.

        Raises:
            UsageError: it cannot be gone on with.
            DaseError: it failed.
        """
        total = [] if steps is None else [f"--steps={arguments.whole('steps', steps, least=1)}"]
        command = ["resume", "--stdin-is-leash", *total, "--", str(self.path)]
        for _ in followed(command, self.path, print if verbose else unheard):
            pass
        return load(self.path)

    def _repr_html_(self) -> str:
        config = self.config
        rows = "".join(
            f"<tr><td>{html.escape(config.agent_name(agent))}</td><td>{int(found.step[-1]):,}</td>"
            f"<td>{number(float(found.return_mean[-1]))}</td></tr>"
            for agent, found in self.evaluations.items()
            if len(found)
        )
        return (
            f"<b>{html.escape(self._directory.name)}</b>: {html.escape(config.env.id)}, "
            f"{several(config.train.agents, 'agent')}, {several(config.train.steps, 'step')} each"
            f"<table><tr><th>agent</th><th>step</th><th>evaluation return</th></tr>{rows}</table>"
        )


class TrainedPolicy:
    """A trained policy in the environment's own shapes and units."""

    def __init__(self, policy: Acting, checkpoint: Checkpoint) -> None:
        with borrowed_env(checkpoint.config.env, owner="the policy") as env:
            self.observation_space, self._flat = raw_space(env)
            self.action_space = env.action_space
        self._environment = checkpoint.config.env.id
        self._policy = policy
        self._size = checkpoint.schema.observation_size
        self._to_env = ActionMap(self.action_space)
        self.step = checkpoint.step

    def act(self, observation: Any) -> npt.NDArray[Any]:
        """The action without noise, of the action space's shape and dtype.

        Of a batch, an array with one dimension more than the observation space's or a list of observations,
        the actions of each, stacked.

        Raises:
            EnvironmentSpecError: the observation is not one of the space, or not finite.
            DivergedError: the policy's action is not finite, as for huge observations.
        """
        shape = box_shape(self.observation_space)
        if shape is not None:
            rows, single = rows_of(observation, shape, self._environment)
            rows = rows.reshape(len(rows), -1)
        else:
            rows, single = self._flattened(observation)
        if (problem := not_finite(rows)) is not None:
            raise EnvironmentSpecError(problem)
        decided = self._policy.act(rows)
        if not np.isfinite(decided).all():
            raise DivergedError("the policy's action is not finite; give it what the environment gives")
        actions = self._to_env(decided)
        return actions[0] if single else actions

    def _flattened(self, observation: Any) -> tuple[npt.NDArray[np.float32], bool]:
        shape = self.observation_space.shape
        single = not isinstance(observation, list) and (shape is None or np.ndim(observation) == len(shape))
        given = [observation] if single else observation
        if not isinstance(given, (list, np.ndarray)) or len(given) == 0:
            raise EnvironmentSpecError(
                f"{kind(observation)} was given; of {self._environment} each observation is one of "
                f"{text(self.observation_space)[:SHOWN]}, and several are a list of at least one"
            )
        assert self._flat is not None  # whose space is no Box
        return np.stack([to_float32(self._flat.observation(each), self._size) for each in given]), single


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, npt.NDArray[np.float64]]:
    flat = [dict(_numbers(record)) for record in records]
    names = dict.fromkeys(name for record in flat for name in record)
    return {name: np.array([record.get(name, np.nan) for record in flat], np.float64) for name in names}


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", float(value)
        elif value is None:
            yield f"{prefix}{key}", np.nan
