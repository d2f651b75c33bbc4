"""The `dase` command: parse, call, print. No logic."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dase_grpc.config import RunConfig
from dase_grpc.errors import ConfigError, DaseError, UsageError

app = typer.Typer(
    help="DASE: deterministic actor-critics that share one replay buffer over gRPC.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Env = Annotated[
    str | None,
    typer.Option("--env", help="Gymnasium id, or package.module:EnvOrFactory.", show_default=False),
]
Agents = Annotated[
    int | None, typer.Option("--agents", help="K, the agents that share the buffer.", show_default=False)
]
Steps = Annotated[
    int | None, typer.Option("--steps", help="Environment steps of each agent.", show_default=False)
]
Seed = Annotated[int | None, typer.Option("--seed", help="The run's one seed.", show_default=False)]
Preset = Annotated[str | None, typer.Option("--preset", help="quickstart or paper/td3.", show_default=False)]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A TOML file, e.g. a run.toml.", show_default=False)
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Any setting; may be repeated.", show_default=False
    ),
]
Gpu = Annotated[
    int | None, typer.Option("--gpu", help="CUDA device index; without it the CPU.", show_default=False)
]


@app.command()
def train(
    env: Env = None,
    agents: Agents = None,
    steps: Steps = None,
    seed: Seed = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    gpu: Gpu = None,
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="One process, bit-for-bit reproducible from the seed.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="The run's folder name.", show_default=False)
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", help="Where runs are kept.")] = Path("runs"),
) -> None:
    """Trains K agents on this machine: one replay service and K learner processes.

    With no arguments it runs the quick start, about two minutes on two cores. With --env it
    uses the paper's settings for TD3.
    """
    from dase_grpc.launch.train import TrainOptions, train_here

    settings = _settings(
        preset,
        config,
        assignments,
        env=env,
        agents=agents,
        steps=steps,
        seed=seed,
        otherwise="quickstart" if env is None else "paper/td3",
    )
    train_here(TrainOptions(settings, runs, name=name, gpu=gpu, lockstep=lockstep, command=sys.argv))


@app.command()
def node(
    role: Annotated[str, typer.Option("--role", help="replay or learner.")],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="replay: where to listen; port 0 is any.")
    ] = "127.0.0.1:50051",
    capacity: Annotated[
        str, typer.Option("--capacity", help='replay: transitions kept, or a size such as "512MiB".')
    ] = "1000000",
    min_size: Annotated[
        int, typer.Option("--min-size", min=1, help="replay: transitions present before batches are served.")
    ] = 256,
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="The run's name; a learner joins whatever run it finds.")
    ] = None,
    replay: Annotated[
        str, typer.Option("--replay", metavar="HOST:PORT", help="learner: the replay's address.")
    ] = "127.0.0.1:50051",
    agent: Annotated[
        int | None,
        typer.Option("--agent", min=0, help="learner: the agent id to take; else the next free one."),
    ] = None,
    gpu: Gpu = None,
    env: Env = None,
    agents: Agents = None,
    steps: Steps = None,
    seed: Seed = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="learner: where results go; else runs/RUN_ID.")
    ] = None,
    metrics_port: Annotated[
        int, typer.Option("--metrics-port", min=0, max=65_535, help="Prometheus endpoint; 0 is off.")
    ] = 0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="replay: allow listening beyond loopback without TLS.")
    ] = False,
    stdin_is_leash: Annotated[bool, typer.Option("--stdin-is-leash", hidden=True)] = False,
) -> None:
    """Runs one node of a cluster until it is done or stopped."""
    if role == "replay":
        from dase_grpc.nodes.replay import ReplayOptions, replay_main

        options = ReplayOptions.parse(
            run_id=run_id,
            listen=listen,
            capacity=capacity,
            min_size=min_size,
            seed=seed or 0,
            metrics_port=metrics_port,
            insecure=insecure,
        )
        raise typer.Exit(replay_main(options, stdin_is_leash=stdin_is_leash))
    if role == "learner":
        from dase_grpc.nodes.learner import LearnerOptions, learner_main
        from dase_grpc.wire.transport import parse_address

        settings = _settings(
            preset, config, assignments, env=env, agents=agents, steps=steps, seed=seed, otherwise="paper/td3"
        )
        learner = LearnerOptions(
            parse_address(replay),
            settings,
            agent_id=agent,
            gpu=gpu,
            run_id=run_id or "",
            run_dir=run_dir,
            metrics_port=metrics_port,
        )
        raise typer.Exit(learner_main(learner, stdin_is_leash=stdin_is_leash))
    raise ConfigError(f"--role {role!r} is neither replay nor learner")


@app.command("config")
def show_config(
    env: Env = None,
    agents: Agents = None,
    steps: Steps = None,
    seed: Seed = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Prints the resolved configuration as TOML."""
    import tomli_w

    settings = _settings(
        preset,
        config,
        assignments,
        env=env,
        agents=agents,
        steps=steps,
        seed=seed,
        otherwise="quickstart" if env is None else "paper/td3",
    )
    typer.echo(tomli_w.dumps(settings.model_dump(mode="json")), nl=False)


@app.command()
def evaluate(
    target: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's folder or a checkpoint's.")
    ],
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="Episodes per agent.")] = 10,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of the first episode; else that of training.")
    ] = None,
    video: Annotated[
        Path | None, typer.Option("--video", help="Film the first agent's first episode (.mp4 or .gif).")
    ] = None,
) -> None:
    """Evaluates the latest checkpoints of a run, or one checkpoint, without noise."""
    from dase_grpc.launch.evaluate import evaluate_checkpoint

    for result in evaluate_checkpoint(target, episodes=episodes, seed=seed, video=video):
        typer.echo(str(result))


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]) -> None:
    """Writes RUN/report.html: learning curves, similarity, throughput."""
    from dase_grpc.runs.directory import RunDirectory
    from dase_grpc.runs.report import write_report

    typer.echo(write_report(RunDirectory.open(run)))


@app.command()
def version() -> None:
    """Prints the version."""
    from importlib.metadata import version as installed

    typer.echo(installed("dase-grpc"))


def main() -> None:
    """Runs the command line; errors of ours become one sentence and an exit code."""
    try:
        app()
    except DaseError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _settings(
    preset: str | None,
    file: Path | None,
    assignments: list[str] | None,
    *,
    env: str | None,
    agents: int | None,
    steps: int | None,
    seed: int | None,
    otherwise: str,
) -> RunConfig:
    from dase_grpc.presets import layered

    flags = {"env.id": env, "train.agents": agents, "train.steps": steps, "train.seed": seed}
    return layered(
        preset_name=preset, file=file, flags=flags, assignments=assignments or [], otherwise=otherwise
    )
