"""The `dase` command: parse, call, print. No logic."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dase_grpc.errors import ConfigError, DaseError
from dase_grpc.flags import choices, configured, files, refuse
from dase_grpc.sections import whole_number

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"

app = typer.Typer(
    help="DASE: deterministic actor-critics that share one replay buffer over gRPC.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _option(flag: str, text: str, *, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=panel, show_default=False, **more)


def _whole(flag: str) -> Callable[[str], int]:
    """Reads a flag's whole number, 1e5 and 100_000 included."""

    def read(text: str) -> int:
        value = whole_number(text)
        if isinstance(value, str):
            raise ConfigError(f"{flag} {text!r} is not a whole number; write it like 100000 or 1e5")
        return value

    return read


def _whole_option(flag: str, text: str) -> Any:
    return _option(flag, text, panel=SETTINGS, parser=_whole(flag), metavar="INTEGER")


SETTINGS: Final = "Settings"
Env = Annotated[str | None, _option("--env", "Gymnasium id, or package.module:EnvOrFactory.", panel=SETTINGS)]
Agents = Annotated[int | None, _whole_option("--agents", "K, the agents that share the buffer.")]
Steps = Annotated[int | None, _whole_option("--steps", "Environment steps of each agent.")]
Seed = Annotated[int | None, _whole_option("--seed", "The run's one seed.")]
Algo = Annotated[
    str | None,
    _option(
        "--algo",
        "td3, ddpg or sac, with the paper's settings; several, as td3,sac, for a mixed ensemble.",
        panel=SETTINGS,
    ),
]
Method = Annotated[
    str | None,
    _option("--method", "single (one agent), dase (shared experience) or dpd (a pair).", panel=SETTINGS),
]
Preset = Annotated[
    str | None, _option("--preset", "quickstart, paper/ALGO or paper/ALGO/ENV.", panel=SETTINGS)
]
ConfigFile = Annotated[Path | None, _option("--config", "A TOML file, e.g. a run.toml.", panel=SETTINGS)]
Assignments = Annotated[
    list[str] | None,
    _option("--set", "Any setting; may be repeated.", panel=SETTINGS, metavar="SECTION.KEY=VALUE"),
]

Gpu = Annotated[int | None, _option("--gpu", "CUDA device index; without it the CPU.")]
Lockstep = Annotated[bool, _option("--lockstep", "One process, bit-for-bit reproducible from the seed.")]
Name = Annotated[str | None, _option("--name", "The run's folder name.")]
Runs = Annotated[Path, _option("--runs", "Where runs are kept; else runs.")]

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]
Role = Annotated[str, _option("--role", "replay or learner.")]
RunId = Annotated[
    str | None, _option("--run-id", "The run's name; a learner without it joins whatever run it finds.")
]
MetricsPort = Annotated[
    int | None,
    _option("--metrics-port", "Prometheus endpoint; 0 is off, the default.", min=0, max=65_535),
]
MetricsHost = Annotated[
    str, _option("--metrics-host", "Where the Prometheus endpoint listens; else 127.0.0.1.")
]
Insecure = Annotated[bool, _option("--insecure", "Allow listening beyond loopback without TLS.")]
Leash = Annotated[bool, typer.Option("--stdin-is-leash", hidden=True)]

REPLAY_NODE: Final = "Replay node"
Listen = Annotated[
    str | None,
    _option(
        "--listen",
        f"Where to listen, else {DEFAULT_ADDRESS}; port 0 is any.",
        panel=REPLAY_NODE,
        metavar="HOST:PORT",
    ),
]
Capacity = Annotated[
    str | None,
    _option("--capacity", 'Transitions kept, else 1000000; or a size such as "512MiB".', panel=REPLAY_NODE),
]
MinSize = Annotated[
    int | None,
    _option("--min-size", "Transitions present before batches are served, else 1.", panel=REPLAY_NODE, min=1),
]

LEARNER_NODE: Final = "Learner node"
Replay = Annotated[
    str | None,
    _option(
        "--replay",
        f"The replay's address, else {DEFAULT_ADDRESS}.",
        panel=LEARNER_NODE,
        metavar="HOST:PORT",
    ),
]
AgentId = Annotated[
    int | None, _option("--agent", "The agent id to take; else the next free one.", panel=LEARNER_NODE, min=0)
]
RunDir = Annotated[
    Path | None, _option("--run-dir", "Where results go; else runs/RUN_ID.", panel=LEARNER_NODE)
]
Resume = Annotated[
    bool, _option("--resume", "Go on from the agent's last checkpoint in --run-dir.", panel=LEARNER_NODE)
]


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Holds the options that come before a command."""


@app.command()
def train(
    *,
    env: Env = None,
    agents: Agents = None,
    steps: Steps = None,
    seed: Seed = None,
    algo: Algo = None,
    method: Method = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    gpu: Gpu = None,
    lockstep: Lockstep = False,
    name: Name = None,
    runs: Runs = Path("runs"),
) -> None:
    """Trains K agents on this machine: one replay service and K learner processes.

    With no arguments it runs the quick start, one to two minutes on two cores. With --env or
    --algo it uses the paper's settings, those for TD3 unless another algorithm is named.
    """
    from dase_grpc.launch.train import TrainOptions, train_here

    settings = configured(
        {**files(preset, config, assignments), **choices(algo, method, env, agents, steps)}, seed
    )
    train_here(TrainOptions(settings, runs, name=name, gpu=gpu, lockstep=lockstep, command=sys.argv))


@app.command()
def node(
    *,
    role: Role,
    run_id: RunId = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    insecure: Insecure = False,
    seed: Seed = None,
    listen: Listen = None,
    capacity: Capacity = None,
    min_size: MinSize = None,
    replay: Replay = None,
    agent: AgentId = None,
    run_dir: RunDir = None,
    resume: Resume = False,
    gpu: Gpu = None,
    env: Env = None,
    agents: Agents = None,
    steps: Steps = None,
    algo: Algo = None,
    method: Method = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    stdin_is_leash: Leash = False,
) -> None:
    """Runs one node of a cluster until it is done or stopped."""
    given = {**files(preset, config, assignments), **choices(algo, method, env, agents, steps)}
    if role == "replay":
        from dase_grpc.nodes.replay import ReplayOptions, replay_main

        learners = {"replay": replay, "agent": agent, "run-dir": run_dir, "gpu": gpu}
        learners["resume"] = resume or None
        refuse({**learners, **given}, role)
        options = ReplayOptions.parse(
            run_id=run_id,
            listen=listen or DEFAULT_ADDRESS,
            capacity=capacity or "1000000",
            min_size=min_size or 1,
            seed=seed or 0,
            metrics_port=metrics_port or 0,
            metrics_host=metrics_host,
            insecure=insecure,
        )
        raise typer.Exit(replay_main(options, stdin_is_leash=stdin_is_leash))
    if role == "learner":
        from dase_grpc.nodes.learner import LearnerOptions, learner_main

        refuse({"listen": listen, "capacity": capacity, "min-size": min_size}, role)
        learner = LearnerOptions.parse(
            configured(given, seed),
            replay=replay or DEFAULT_ADDRESS,
            agent_id=agent,
            gpu=gpu,
            run_id=run_id or "",
            run_dir=run_dir,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            insecure=insecure,
            command=sys.argv,
            resume=resume,
        )
        raise typer.Exit(learner_main(learner, stdin_is_leash=stdin_is_leash))
    raise ConfigError(f"--role {role!r} is neither replay nor learner")


@app.command("resume")
def resume_run(
    run: RunArgument,
    *,
    steps: Annotated[
        int | None,
        _option(
            "--steps",
            "The new total of each agent's environment steps; else the run's own.",
            parser=_whole("--steps"),
            metavar="INTEGER",
        ),
    ] = None,
    gpu: Gpu = None,
    empty_buffer: Annotated[
        bool, _option("--empty-buffer", "Go on although the buffer of the run's processes is gone.")
    ] = False,
) -> None:
    """Goes on with a run that was stopped, was killed or has finished, in its own folder.

    A lockstep run goes on bit for bit as if there had been no break.
    """
    from dase_grpc.launch.resume import ResumeOptions, resume_here

    resume_here(ResumeOptions(run, steps, gpu=gpu, empty_buffer=empty_buffer, command=sys.argv))


@app.command()
def verify(run: RunArgument) -> None:
    """Checks every file of a run and says what can be resumed.

    Exits with 0 if all is sound, with 1 if something is damaged, with 2 if nothing can be resumed.
    """
    from rich.console import Console

    from dase_grpc.launch.verify import verify_here

    raise typer.Exit(verify_here(run, Console()))


@app.command("config")
def show_config(
    *,
    env: Env = None,
    agents: Agents = None,
    steps: Steps = None,
    seed: Seed = None,
    algo: Algo = None,
    method: Method = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Prints the resolved configuration as TOML."""
    import tomli_w

    settings = configured(
        {**files(preset, config, assignments), **choices(algo, method, env, agents, steps)}, seed
    )
    typer.echo(tomli_w.dumps(settings.model_dump(mode="json")), nl=False)


@app.command()
def evaluate(
    target: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's folder or a checkpoint's.")
    ],
    *,
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="Episodes per agent.")] = 10,
    seed: Annotated[
        int | None, _option("--seed", "Seed of the first episode; else that of training.")
    ] = None,
    best: Annotated[
        bool, _option("--best", "The best checkpoint of each agent instead of its latest.")
    ] = False,
    video: Annotated[
        Path | None, _option("--video", "Film the first agent's first episode (.mp4 or .gif).")
    ] = None,
) -> None:
    """Evaluates the latest checkpoints of a run, or one checkpoint, without noise."""
    from dase_grpc.launch.evaluate import evaluate_checkpoint

    for result in evaluate_checkpoint(target, episodes=episodes, seed=seed, video=video, best=best):
        typer.echo(str(result))


@app.command()
def report(run: RunArgument) -> None:
    """Writes RUN/report.html: learning curves, similarity, throughput."""
    from dase_grpc.runs.directory import RunDirectory
    from dase_grpc.runs.report import write_report

    typer.echo(write_report(RunDirectory.open(run)))


@app.command("compare")
def compare_runs(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or folders that contain some.")
    ],
    *,
    out: Annotated[Path, _option("--out", "Where the files go; else comparison.")] = Path("comparison"),
    unfinished: Annotated[
        bool, _option("--unfinished", "Use runs that have not finished, up to where they are.")
    ] = False,
) -> None:
    """Compares runs over their seeds: statistics, learning curves, published numbers beside them."""
    from rich.console import Console

    from dase_grpc.launch.comparison import compare_here

    compare_here(paths, out, unfinished=unfinished, console=Console(), warnings=Console(stderr=True))


@app.command()
def version() -> None:
    """Prints the version."""
    from importlib.metadata import version as installed

    typer.echo(installed("dase-grpc"))


def main() -> None:
    """Runs the command line; errors of ours become one sentence and an exit code."""
    try:
        app(prog_name="dase")
    except DaseError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
