"""The flags of the `dase` command: their names, types and help, shared by its commands."""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dase_grpc.config.gpus import Gpus
from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.sections import whole_number
from dase_grpc.errors import ConfigError
from dase_grpc.launch.experiments.sites import Place
from dase_grpc.nodes.options import DEFAULT_ADDRESS, Flag, NodeOptions
from dase_grpc.process.signals import end_with_launcher
from dase_grpc.replay.security.identity import TOKEN_FILE_VARIABLE


def option(flag: str, text: str, *, panel: str | None = None, **more: Any) -> Any:
    """A flag with its help, in a panel of its kind."""
    return typer.Option(flag, help=text, rich_help_panel=panel, show_default=False, **more)


def of(flag: Flag) -> Any:
    """A flag that a node's options declare."""
    return option(flag.name, flag.help, panel=flag.panel, **flag.more)


def _run(path: Path) -> Path:
    """Refuses what is no run, before anything large is imported; what follows does so for other arguments."""
    from dase_grpc.runs.lookup import require_run

    require_run(path)
    return path


def _with_policies(path: Path) -> Path:
    from dase_grpc.runs.lookup import require_policies

    require_policies(path)
    return path


def _servable(path: Path) -> Path:
    from dase_grpc.learning.agents.model_files import READERS

    return path if path.suffix in READERS else _with_policies(path)


def _folders(paths: list[Path]) -> list[Path]:
    from dase_grpc.runs.lookup import require_folders

    require_folders(paths)
    return paths


def _experiment(path: Path) -> Path:
    from dase_grpc.launch.experiments.file import read_experiment

    read_experiment(path)
    return path


def _truth(text: str | None) -> str | None:
    if text not in (None, "true", "false"):
        raise ConfigError(f"--explore {reprlib.repr(text)} is neither true nor false")
    return text


def _heeded(given: bool) -> bool:
    """Heeds the leash from now on, for a command may take seconds until it does."""
    end_with_launcher(stdin_is_leash=given)
    return given


def whole(flag: str, text: str, *, panel: str | None = None) -> Any:
    """A flag that takes a whole number, 1e5 and 100_000 included."""

    def read(given: str) -> int:
        value = whole_number(given)
        if isinstance(value, str):
            raise ConfigError(
                f"{flag} {reprlib.repr(given)} is not a whole number; write it like 100000 or 1e5"
            )
        return value

    return option(flag, text, panel=panel, parser=read, metavar="INTEGER")


def _setting(kind: Any, flag: str, text: str, **more: Any) -> Any:
    make = whole if kind is int else option
    return Annotated[kind | None, make(flag, text, panel="Settings", **more)]


SETTINGS: Final[Mapping[str, Any]] = {
    "env": _setting(str, "--env", "Gymnasium id, package:Name-v0 or module:Class."),
    "agents": _setting(int, "--agents", "K, the agents that share the buffer."),
    "actors": _setting(int, "--actors", "Processes that explore for each learner."),
    "steps": _setting(int, "--steps", "Environment steps of each agent."),
    "seed": _setting(int, "--seed", "The run's one seed."),
    "explore": Annotated[
        str | None,
        option("--explore", "Do learners explore, or their actors?", metavar="true|false", callback=_truth),
    ],
    "algo": _setting(
        str,
        "--algo",
        "td3, ddpg or sac (deterministic actor, no entropy term), with the paper's settings, or your own as "
        "module:Class, with TD3's; several, as td3,sac, for a mixed ensemble.",
    ),
    "method": _setting(
        str, "--method", "single (one agent), dase (shared experience, the default) or dpd (a pair)."
    ),
    "preset": _setting(str, "--preset", "quickstart, paper/ALGO or paper/ALGO/ENV."),
    "config": _setting(Path, "--config", "A TOML file, e.g. a run.toml."),
    "assignments": _setting(list[str], "--set", "Any setting; may be repeated.", metavar="SECTION.KEY=VALUE"),
}
"""The flags of a run's settings, by the parameters of commands."""

RunGpus = Annotated[
    Gpus | None,
    option(
        "--gpu",
        "CUDA device indices, as 0 or 0,1,2, which learners take in turn, or all; without it the CPU.",
        parser=Gpus.parse,
        metavar="N[,...]|all",
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", callback=_run)]
PoliciesArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_CHECKPOINT", help="A run's folder or a checkpoint's.", callback=_with_policies
    ),
]
ServedArgument = Annotated[
    Path,
    typer.Argument(
        metavar="TARGET", help="A run's folder, a checkpoint's, FILE.onnx or FILE.pt.", callback=_servable
    ),
]
ServedAgent = Annotated[
    str | None,
    option(
        "--agent",
        "Of a run, whose policy: an agent's, the best's (the default), or the ensemble's, which acts by all "
        "critics.",
        metavar="N|best|ensemble",
    ),
]
ExperimentArgument = Annotated[
    Path,
    typer.Argument(metavar="FILE.toml", help="The experiment, docs/experiments.md.", callback=_experiment),
]
OnPlace = Annotated[Place, option("--on", "Where cells run: here, or by jobs of a cluster.")]
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait for what is queued on Slurm, or leave it to itself.")
]
Apply = Annotated[bool, option("--apply", "Give the Job to Kubernetes by kubectl; else it is printed.")]
Cell = Annotated[
    str | None,
    option(
        "--cell",
        "Run this cell alone, here, while others may run the others; @FILE:N is the name in a file's line N.",
        metavar="NAME",
    ),
]
CellGpus = Annotated[str | None, option("--gpu", "GPUs for --cell, as of dase train.", metavar="N[,...]|all")]
RunsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUNS...", help="Folders of runs, or folders that contain some.", callback=_folders
    ),
]
MaxRestarts = Annotated[
    int | None,
    option(
        "--max-restarts",
        "How often in a row a node that fails is started again before it is given up; else 5.",
        min=0,
    ),
]
AsJson = Annotated[bool, option("--json", "Print the result as JSON.")]
Leash = Annotated[bool, typer.Option("--stdin-is-leash", hidden=True, is_eager=True, callback=_heeded)]

Tls = Annotated[Path | None, of(NodeOptions.flags()["tls"])]
Replays = Annotated[
    str,
    option(
        "--replay",
        f"As for nodes: the replay's address, else {DEFAULT_ADDRESS}, or those of its shards.",
        metavar="HOST:PORT[,...]",
    ),
]
TokenFile = Annotated[
    Path | None,
    option(
        "--token-file",
        "A token to show, with a --tls folder that needs ca.crt only.",
        envvar=TOKEN_FILE_VARIABLE,
        metavar="FILE",
    ),
]
Timeout = Annotated[
    float,
    option("--timeout", "How long a replay is given to answer.", min=0.1, max=86_400, metavar="SECONDS"),
]


def parameter(name: str, kind: Any, default: Any = None) -> inspect.Parameter:
    """What typer makes a flag of."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def take(command: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> None:
    """Has typer read the flags of a command from these parameters."""
    vars(command)["__signature__"] = inspect.Signature(list(parameters))


def configured(*more: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the flags of settings, `more` of them among these, and what they come to."""
    names = [name for name in SETTINGS if name in more or name not in ("actors", "steps", "explore")]

    def with_settings(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            command(settings({name: given.pop(name) for name in names}), **given)

        _, *own = inspect.signature(command).parameters.values()
        take(run, [*(parameter(name, SETTINGS[name]) for name in names), *own])
        return run

    return with_settings


def settings(given: Mapping[str, Any]) -> RunConfig:
    """The paper's settings for what is named, else the quick start's, then what was given."""
    from dase_grpc.config.presets import layered

    explore, actors = given.get("explore"), given.get("actors")
    return layered(
        preset_name=given["preset"],
        file=given["config"],
        flags={
            "env.id": given["env"],
            "agent.algorithm": given["algo"],
            "train.agents": given["agents"],
            "train.steps": given.get("steps"),
            "train.seed": given["seed"],
            "train.actors": actors,
            "train.explore": False if actors else None if explore is None else explore == "true",
        },
        assignments=given["assignments"] or [],
        method=given["method"],
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
