"""`dase node` and `dase serve`: their flags, made of the options of each role, and what they start."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dase_grpc.cli import flags
from dase_grpc.cli.flags import parameter
from dase_grpc.errors import ConfigError
from dase_grpc.nodes.options import ActorOptions, EvaluatorOptions, Flag, LearnerOptions, NodeOptions
from dase_grpc.nodes.policy_options import PolicyOptions
from dase_grpc.nodes.replay_options import ReplayOptions

ROLES: Final[Mapping[str, type[NodeOptions]]] = {
    "replay": ReplayOptions,
    "learner": LearnerOptions,
    "actor": ActorOptions,
    "evaluator": EvaluatorOptions,
}
"""What `dase node` starts, and what each is told."""

SETTINGS: Final = ("seed", *(name for name in flags.SETTINGS if name not in ("seed", "actors")))
"""What a role takes that goes by the run's settings; a replay takes the seed alone."""

FLAGS: Final[dict[str, Flag]] = {
    flag.parameter: flag for options in ROLES.values() for flag in options.flags().values()
}
TAKES: Final = {
    role: {"seed", *(flag.parameter for flag in options.flags().values())}
    | (set() if role == "replay" else set(SETTINGS))
    for role, options in ROLES.items()
}
"""The parameters of each role; a flag that others alone take is refused rather than ignored."""


SERVE_FLAGS: Final = {name: replace(flag, panel=None) for name, flag in PolicyOptions.flags().items()}


def _role(role: str) -> str:
    if role not in ROLES:
        raise ConfigError(f"--role {role!r} is none of the roles: {', '.join(ROLES)}")
    return role


Role = Annotated[
    str, flags.option("--role", " or ".join(", ".join(ROLES).rsplit(", ", 1)) + ".", callback=_role)
]


def node(context: typer.Context, *, role: str, stdin_is_leash: bool = False, **given: Any) -> None:
    """Runs one node of a cluster until it is done or stopped."""
    for name, value in given.items():
        if name in TAKES[role] or value is None or value is False or _is_of_environment(context, name):
            continue
        flag = "set" if name == "assignments" else name.replace("_", "-")
        raise ConfigError(f"--{flag} is not for --role {role}; leave it out, or start the node it is for")
    options = _options(role, given)
    raise typer.Exit(_main(role)(options, stdin_is_leash=stdin_is_leash))


def _is_of_environment(context: typer.Context, name: str) -> bool:
    """Whether a flag's value is that of a variable, which may be for other nodes of this machine."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


def _options(role: str, given: dict[str, Any]) -> NodeOptions:
    options = ROLES[role]
    values = {name: given[flag.parameter] for name, flag in options.flags().items()}
    if role == "replay":
        return options.parse(seed=given["seed"], **values)
    values["config"] = flags.settings(given)
    if "run_dir" in values:
        values["command"] = sys.argv
    return options.parse(**values)


def _main(role: str) -> Callable[..., int]:
    """What runs a node of this role; imported now that its options are found to be right."""
    if role == "replay":
        from dase_grpc.nodes.replay import replay_main

        return replay_main
    if role == "learner":
        from dase_grpc.nodes.learner import learner_main

        return learner_main
    if role == "actor":
        from dase_grpc.nodes.actor import actor_main

        return actor_main
    from dase_grpc.nodes.evaluator import evaluator_main

    return evaluator_main


def serve(*, target: Path, agent: str | None, stdin_is_leash: bool = False, **given: Any) -> None:
    """Answers observations over gRPC with the actions of a trained policy, until it is stopped.

    TARGET is a run, a checkpoint, or a file of `dase export`. What to call, and a client: docs/serving.md.
    """
    options = PolicyOptions.parse(**{name: given[flag.parameter] for name, flag in SERVE_FLAGS.items()})
    from dase_grpc.launch.serve import serve_here

    raise typer.Exit(serve_here(target, agent, options, stdin_is_leash=stdin_is_leash))


def _parameter(name: str, flag: Flag) -> inspect.Parameter:
    if flag.kind is bool:
        return parameter(name, Annotated[bool, flags.of(flag)], default=False)
    return parameter(name, Annotated[flag.kind | None, flags.of(flag)])


flags.take(
    node,
    [
        parameter("context", typer.Context, default=inspect.Parameter.empty),
        parameter("role", Role, default=inspect.Parameter.empty),
        *(_parameter(name, flag) for name, flag in FLAGS.items()),
        *(parameter(name, flags.SETTINGS[name]) for name in SETTINGS),
        parameter("stdin_is_leash", flags.Leash, default=False),
    ],
)

flags.take(
    serve,
    [
        parameter("target", flags.ServedArgument, default=inspect.Parameter.empty),
        parameter("agent", flags.ServedAgent),
        *(_parameter(flag.parameter, flag) for flag in SERVE_FLAGS.values()),
        parameter("stdin_is_leash", flags.Leash, default=False),
    ],
)
