"""`dase node`: which flags each role takes, and what is started with them."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import typer

from dase_grpc.cli import flags

SHARED: Final = ("run_id", "metrics_port", "metrics_host", "metrics_tls", "insecure", "tls")
"""What nodes of every role take, beside the seed."""

SETTINGS: Final = ("preset", "config", "assignments", "algo", "method", "env", "agents", "steps", "explore")
TAKES: Final[Mapping[str, tuple[str, ...]]] = {
    "replay": ("listen", "capacity", "min_size", "data_dir", "sync_every", "tokens", "shard"),
    "learner": (
        "replay",
        "replay_timeout",
        "token_file",
        "agent",
        "run_dir",
        "resume",
        "unfinished_code",
        "gpu",
        *SETTINGS,
    ),
    "actor": ("replay", "replay_timeout", "token_file", "agent", "envs", *SETTINGS),
    "evaluator": ("replay", "replay_timeout", "token_file", "agent", "run_dir", *SETTINGS),
}
"""What a role takes besides; a flag that another role alone takes is refused rather than ignored."""


def node(
    *,
    role: flags.Role,
    run_id: flags.RunId = None,
    metrics_port: flags.MetricsPort = None,
    metrics_host: flags.MetricsHost = "127.0.0.1",
    metrics_tls: flags.MetricsTls = None,
    insecure: flags.Insecure = False,
    tls: flags.Tls = None,
    seed: flags.Seed = None,
    listen: flags.Listen = None,
    capacity: flags.Capacity = None,
    min_size: flags.MinSize = None,
    data_dir: flags.DataDir = None,
    sync_every: flags.SyncEvery = None,
    tokens: flags.Tokens = None,
    shard: flags.Shard = None,
    replay: flags.Replay = None,
    replay_timeout: flags.ReplayTimeout = None,
    token_file: flags.TokenFile = None,
    agent: flags.AgentIds = None,
    envs: flags.Envs = None,
    run_dir: flags.RunDir = None,
    resume: flags.Resume = False,
    unfinished_code: flags.UnfinishedCode = None,
    gpu: flags.Gpu = None,
    env: flags.Env = None,
    agents: flags.Agents = None,
    steps: flags.Steps = None,
    explore: flags.Explore = None,
    algo: flags.Algo = None,
    method: flags.Method = None,
    preset: flags.Preset = None,
    config: flags.ConfigFile = None,
    assignments: flags.Assignments = None,
    stdin_is_leash: flags.Leash = False,
) -> None:
    """Runs one node of a cluster until it is done or stopped."""
    given = dict(locals())  # every flag by its parameter's name; listed once more they would fill a screen
    others = {name: given[name] for name in _FLAGS if name not in TAKES[role]}
    flags.refuse({_FLAGS[name]: None if value is False else value for name, value in others.items()}, role)
    here = Path.cwd()  # before there is an environment, which may move; these are read anew when they change
    given |= {name: here / given[name] for name in ("tls", "metrics_tls", "token_file") if given[name]}
    raise typer.Exit(_START[role](given))


def _replay(given: Mapping[str, Any]) -> int:
    from dase_grpc.nodes.replay import ReplayOptions, replay_main

    options = ReplayOptions.parse(
        listen=given["listen"] or flags.DEFAULT_ADDRESS,
        capacity=given["capacity"],
        min_size=given["min_size"] or 1,
        seed=given["seed"] or 0,
        data_dir=given["data_dir"],
        sync_every_s=given["sync_every"],
        tokens=given["tokens"],
        shard=given["shard"],
        **_shared(given),
    )
    return replay_main(options, stdin_is_leash=given["stdin_is_leash"])


def _learner(given: Mapping[str, Any]) -> int:
    settings = flags.settings(seed=given["seed"], **{name: given[name] for name in SETTINGS})
    from dase_grpc.nodes.learner import LearnerOptions, learner_main

    options = LearnerOptions.parse(
        settings,
        replay=given["replay"] or flags.DEFAULT_ADDRESS,
        agent_id=flags.one_agent(given["agent"], given["role"]),
        gpu=given["gpu"],
        run_dir=given["run_dir"],
        command=sys.argv,
        replay_timeout_s=given["replay_timeout"],
        resume=given["resume"],
        unfinished_code=given["unfinished_code"] or 0,
        token_file=given["token_file"],
        **_shared(given),
    )
    return learner_main(options, stdin_is_leash=given["stdin_is_leash"])


def _actor(given: Mapping[str, Any]) -> int:
    settings = flags.settings(seed=given["seed"], **{name: given[name] for name in SETTINGS})
    from dase_grpc.nodes.actor import ActorOptions, actor_main

    options = ActorOptions.parse(
        settings,
        replay=given["replay"] or flags.DEFAULT_ADDRESS,
        agent_id=flags.one_agent(given["agent"], given["role"]),
        envs=given["envs"] or 1,
        replay_timeout_s=given["replay_timeout"],
        token_file=given["token_file"],
        **_shared(given),
    )
    return actor_main(options, stdin_is_leash=given["stdin_is_leash"])


def _evaluator(given: Mapping[str, Any]) -> int:
    settings = flags.settings(seed=given["seed"], **{name: given[name] for name in SETTINGS})
    from dase_grpc.nodes.evaluator import EvaluatorOptions, evaluator_main

    options = EvaluatorOptions.parse(
        settings,
        replay=given["replay"] or flags.DEFAULT_ADDRESS,
        agents=given["agent"] or (),
        run_dir=given["run_dir"],
        command=sys.argv,
        replay_timeout_s=given["replay_timeout"],
        token_file=given["token_file"],
        **_shared(given),
    )
    return evaluator_main(options, stdin_is_leash=given["stdin_is_leash"])


def _shared(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in SHARED}


_START: Final[Mapping[str, Callable[[Mapping[str, Any]], int]]] = {
    "replay": _replay,
    "learner": _learner,
    "actor": _actor,
    "evaluator": _evaluator,
}
_FLAGS: Final = {name: name.replace("_", "-") for names in TAKES.values() for name in names} | {
    "assignments": "set"
}
"""What the flag of a parameter is called."""
