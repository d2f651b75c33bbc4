"""`dase node`: its flags, made of the options of each role, and what is started with them."""

import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from dase_grpc.cli import flags
from dase_grpc.cli.flags import ROLES
from dase_grpc.nodes.options import Flag, NodeOptions

SETTINGS: Final = {
    "seed": flags.Seed,
    "env": flags.Env,
    "agents": flags.Agents,
    "steps": flags.Steps,
    "explore": flags.Explore,
    "algo": flags.Algo,
    "method": flags.Method,
    "preset": flags.Preset,
    "config": flags.ConfigFile,
    "assignments": flags.Assignments,
}
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


def node(*, role: str, stdin_is_leash: bool = False, **given: Any) -> None:
    """Runs one node of a cluster until it is done or stopped."""
    others = {name: value for name, value in given.items() if name not in TAKES[role] and value is not False}
    flags.refuse({_flag(name): value for name, value in others.items()}, role)
    options = _options(role, given)
    raise typer.Exit(_main(role)(options, stdin_is_leash=stdin_is_leash))


def _options(role: str, given: dict[str, Any]) -> NodeOptions:
    options = ROLES[role]
    values = {name: given[flag.parameter] for name, flag in options.flags().items()}
    if role == "replay":
        return options.parse(seed=given["seed"], **values)
    values["config"] = flags.settings(**{name: given[name] for name in SETTINGS})
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


def _flag(parameter: str) -> str:
    return "set" if parameter == "assignments" else parameter.replace("_", "-")


def _typed(flag: Flag) -> Any:
    return Annotated[flag.kind if flag.kind is bool else flag.kind | None, flags.of(flag)]


def _signature() -> inspect.Signature:
    """What typer reads the flags of `dase node` from."""
    own = {name: _typed(flag) for name, flag in FLAGS.items()} | SETTINGS | {"stdin_is_leash": flags.Leash}
    switches = {"stdin_is_leash", *(name for name, flag in FLAGS.items() if flag.kind is bool)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter("role", keyword, annotation=flags.Role),
            *(
                inspect.Parameter(name, keyword, default=False if name in switches else None, annotation=kind)
                for name, kind in own.items()
            ),
        ]
    )


vars(node)["__signature__"] = _signature()
