"""The flags of the `dase` command: their names, types and help, shared by its commands."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.sections import whole_number
from dase_grpc.errors import ConfigError
from dase_grpc.nodes.options import ActorOptions, EvaluatorOptions, Flag, LearnerOptions, NodeOptions
from dase_grpc.nodes.replay_options import ReplayOptions
from dase_grpc.process.leash import end_with_launcher

ROLES: Final[Mapping[str, type[NodeOptions]]] = {
    "replay": ReplayOptions,
    "learner": LearnerOptions,
    "actor": ActorOptions,
    "evaluator": EvaluatorOptions,
}
"""What `dase node` starts, and what each is told."""


def option(flag: str, text: str, *, panel: str | None = None, **more: Any) -> Any:
    """A flag with its help, in a panel of its kind."""
    return typer.Option(flag, help=text, rich_help_panel=panel, show_default=False, **more)


def of(flag: Flag) -> Any:
    """A flag that a node's options declare."""
    return option(flag.name, flag.help, panel=flag.panel, **flag.more)


def _run(path: Path) -> Path:
    """Refuses what is no run, before anything large is imported."""
    from dase_grpc.runs.lookup import require_run

    require_run(path)
    return path


def _role(role: str) -> str:
    if role not in ROLES:
        raise ConfigError(f"--role {role!r} is none of the roles: {', '.join(ROLES)}")
    return role


def _with_policies(path: Path) -> Path:
    from dase_grpc.runs.lookup import require_policies

    require_policies(path)
    return path


def _folders(paths: list[Path]) -> list[Path]:
    from dase_grpc.runs.lookup import require_folders

    require_folders(paths)
    return paths


def _experiment(path: Path) -> Path:
    """Refuses a file that is no experiment, before anything large is imported."""
    from dase_grpc.launch.experiments.file import read_experiment

    read_experiment(path)
    return path


def _whole(flag: str) -> Callable[[str], int]:
    """Reads a flag's whole number, 1e5 and 100_000 included."""

    def read(text: str) -> int:
        value = whole_number(text)
        if isinstance(value, str):
            raise ConfigError(
                f"{flag} {reprlib.repr(text)} is not a whole number; write it like 100000 or 1e5"
            )
        return value

    return read


def _truth(text: str | None) -> str | None:
    if text not in (None, "true", "false"):
        raise ConfigError(f"--explore {reprlib.repr(text)} is neither true nor false")
    return text


def whole_option(flag: str, text: str) -> Any:
    """A setting's flag that takes a whole number."""
    return option(flag, text, panel=SETTINGS, parser=_whole(flag), metavar="INTEGER")


SETTINGS: Final = "Settings"
Env = Annotated[str | None, option("--env", "Gymnasium id, package:Name-v0 or module:Class.", panel=SETTINGS)]
Agents = Annotated[int | None, whole_option("--agents", "K, the agents that share the buffer.")]
Steps = Annotated[int | None, whole_option("--steps", "Environment steps of each agent.")]
Seed = Annotated[int | None, whole_option("--seed", "The run's one seed.")]
Algo = Annotated[
    str | None,
    option(
        "--algo",
        "td3, ddpg or sac (deterministic actor, no entropy term), with the paper's settings; several, as "
        "td3,sac, for a mixed ensemble.",
        panel=SETTINGS,
    ),
]
Method = Annotated[
    str | None,
    option(
        "--method",
        "single (one agent), dase (shared experience, the default) or dpd (a pair).",
        panel=SETTINGS,
    ),
]
Preset = Annotated[
    str | None, option("--preset", "quickstart, paper/ALGO or paper/ALGO/ENV.", panel=SETTINGS)
]
Explore = Annotated[
    str | None,
    option("--explore", "Do learners explore, or their actors?", metavar="true|false", callback=_truth),
]
Actors = Annotated[int | None, whole_option("--actors", "Processes that explore for each learner.")]
ConfigFile = Annotated[Path | None, option("--config", "A TOML file, e.g. a run.toml.", panel=SETTINGS)]
Assignments = Annotated[
    list[str] | None,
    option("--set", "Any setting; may be repeated.", panel=SETTINGS, metavar="SECTION.KEY=VALUE"),
]

Gpu = Annotated[int | None, of(LearnerOptions.flags()["gpu"])]
Lockstep = Annotated[bool, option("--lockstep", "One process, bit-for-bit reproducible from the seed.")]
Stack = Annotated[bool, option("--stack", "One process that updates all agents at once: for a GPU.")]
Name = Annotated[str | None, option("--name", "The run's folder name.")]
Runs = Annotated[Path, option("--runs", "Where runs are kept; else runs.")]

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", callback=_run)]
PoliciesArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_CHECKPOINT", help="A run's folder or a checkpoint's.", callback=_with_policies
    ),
]
ExperimentArgument = Annotated[
    Path,
    typer.Argument(metavar="FILE.toml", help="The experiment, docs/experiments.md.", callback=_experiment),
]
RunsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUNS...", help="Folders of runs, or folders that contain some.", callback=_folders
    ),
]
Total = Annotated[
    int | None,
    option(
        "--steps",
        "The new total of each agent's environment steps; else the run's own.",
        parser=_whole("--steps"),
        metavar="INTEGER",
    ),
]
EmptyBuffer = Annotated[
    bool, option("--empty-buffer", "Go on with an empty buffer; one that lies there is put aside.")
]
MaxRestarts = Annotated[
    int | None,
    option(
        "--max-restarts",
        "How often in a row a node that fails is started again before it is given up; else 5.",
        min=0,
    ),
]

Rounds = Annotated[int, option("--rounds", "How often each fault comes; else once.", min=1)]
DrillDir = Annotated[
    Path | None, option("--dir", "A new folder for buffer, checkpoints and logs; else a temporary one.")
]
AsJson = Annotated[bool, option("--json", "Print the result as JSON.")]

Role = Annotated[str, option("--role", " or ".join(", ".join(ROLES).rsplit(", ", 1)) + ".", callback=_role)]
Tls = Annotated[Path | None, of(NodeOptions.flags()["tls"])]


def _heeded(given: bool) -> bool:
    """Heeds the leash from now on, for a command may take seconds until it does."""
    end_with_launcher(stdin_is_leash=given)
    return given


Leash = Annotated[bool, typer.Option("--stdin-is-leash", hidden=True, is_eager=True, callback=_heeded)]


def settings(
    *,
    preset: str | None,
    config: Path | None,
    assignments: list[str] | None,
    algo: str | None,
    method: str | None,
    env: str | None,
    agents: int | None,
    seed: int | None,
    steps: int | None = None,
    explore: str | None = None,
    actors: int | None = None,
) -> RunConfig:
    """The paper's settings for what is named, else the quick start's, then what was given.

    Raises:
        ConfigError: they cannot be used.
    """
    from dase_grpc.config.presets import layered

    return layered(
        preset_name=preset,
        file=config,
        flags={
            "env.id": env,
            "agent.algorithm": algo,
            "train.agents": agents,
            "train.steps": steps,
            "train.seed": seed,
            "train.actors": actors,
            "train.explore": False if actors else None if explore is None else explore == "true",
        },
        assignments=assignments or [],
        method=method,
    )


def require_values(arguments: Sequence[str]) -> None:
    """Refuses arguments that are empty, as a script's variable may be that was never set.

    Taken for flags that were not given, or for the current folder, they would do what nobody asked for.
    """
    for before, argument in zip(("", *arguments), arguments, strict=False):
        flag, assigned, value = argument.partition("=") if argument.startswith("--") else ("", "=", argument)
        if assigned and not value.strip():
            name = flag or (before if before.startswith("-") and "=" not in before else "an argument")
            raise ConfigError(f"{name} is empty; give it a value, or leave it out")


def refuse(flags: Mapping[str, object], role: str) -> None:
    """Refuses flags that mean nothing to this role, rather than ignoring them."""
    for flag, value in flags.items():
        if value is not None:
            raise ConfigError(f"--{flag} is not for --role {role}; leave it out, or start the node it is for")
