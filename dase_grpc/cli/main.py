"""The `dase` command: parse, call, print. No logic.

What takes seconds to import is imported once settings and paths (their callbacks) are found to be right.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

import dase_grpc
from dase_grpc.cli import certs, flags
from dase_grpc.cli.node import node, serve
from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import DaseError
from dase_grpc.nodes.options import DEFAULT_ADDRESS

app = typer.Typer(
    help="DASE: deterministic actor-critics that share one replay buffer over gRPC.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(certs.app, name="certs")


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
@flags.configured("actors", "steps")
def train(
    settings: RunConfig,
    *,
    gpu: flags.RunGpus = None,
    lockstep: Annotated[
        bool, flags.option("--lockstep", "One process, bit-for-bit reproducible from the seed.")
    ] = False,
    stack: Annotated[
        bool, flags.option("--stack", "One process that updates all agents at once: for a GPU.")
    ] = False,
    name: Annotated[str | None, flags.option("--name", "The run's folder name.")] = None,
    runs: Annotated[Path, flags.option("--runs", "Where runs are kept; else runs.")] = Path("runs"),
    max_restarts: flags.MaxRestarts = None,
    stdin_is_leash: flags.Leash = False,
) -> None:
    """Trains K agents on this machine: one replay service and K learner processes.

    With no arguments it runs the quick start, one to two minutes on two cores.

    With --env or --algo: the paper's settings, 25,000 random steps first, for TD3 unless another is named.
    """
    from dase_grpc.launch.forks import fork_server

    in_processes = not (lockstep or stack)
    with fork_server(threads=settings.train.threads, wanted=in_processes and gpu is None) as forks:
        from dase_grpc.launch.train import TrainOptions, train_here

        train_here(
            TrainOptions(
                settings,
                runs,
                name=name,
                gpus=gpu,
                lockstep=lockstep,
                stack=stack,
                command=sys.argv,
                stdin_is_leash=stdin_is_leash,
                max_restarts=max_restarts,
                forks=forks,
            )
        )


@app.command()
def experiment(
    file: flags.ExperimentArgument,
    *,
    runs: Annotated[Path, flags.option("--runs", "Where the experiment's folder is kept; else runs.")] = Path(
        "runs"
    ),
    jobs: Annotated[
        int | None, flags.option("--jobs", "Cores to keep busy; else all that there are.", min=1)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells and their states; start nothing.")
    ] = False,
    place: flags.OnPlace = "local",
    wait: flags.Wait = True,
    apply: flags.Apply = False,
    cell: flags.Cell = None,
    gpu: flags.CellGpus = None,
) -> None:
    """Trains every cell of a matrix that has not finished yet, several at a time."""
    from dase_grpc.launch.experiments.experiment import ExperimentOptions, experiment_here

    raise typer.Exit(
        experiment_here(
            ExperimentOptions(
                file,
                runs,
                jobs,
                dry_run=dry_run,
                command=sys.argv,
                place=place,
                wait=wait,
                apply=apply,
                cell=cell,
                gpu=gpu,
            )
        )
    )


app.command("node")(node)


@app.command()
def status(
    *,
    replay: flags.Replays = DEFAULT_ADDRESS,
    as_json: flags.AsJson = False,
    check: Annotated[
        bool, flags.option("--check", "Exit with 5 where something is wrong with the cluster.")
    ] = False,
    tls: flags.Tls = None,
    token_file: flags.TokenFile = None,
    timeout: flags.Timeout = 5.0,
) -> None:
    """Prints how a running cluster is: agents, other nodes, buffer, rates, similarities.

    Looks twice, a second apart, for the rates. Exits with 0 where a replay answered, with 1 where none did,
    with 3 where it refused.
    """
    from rich.console import Console

    from dase_grpc.observe.once import status_here
    from dase_grpc.observe.view import Target

    target = Target.parse(replay=replay, tls=tls, token_file=token_file, timeout_s=timeout)
    raise typer.Exit(status_here(target, Console(), as_json=as_json, check=check))


@app.command()
def top(
    *,
    replay: flags.Replays = DEFAULT_ADDRESS,
    tls: flags.Tls = None,
    token_file: flags.TokenFile = None,
    timeout: flags.Timeout = 2.0,
) -> None:
    """Shows a running cluster in this terminal, anew every second; q ends it.

    Where the replay is away it says so, and goes on when it is back.
    """
    from rich.console import Console

    from dase_grpc.observe.top import top_here
    from dase_grpc.observe.view import Target

    top_here(Target.parse(replay=replay, tls=tls, token_file=token_file, timeout_s=timeout), Console())


@app.command()
def resume(
    run: flags.RunArgument,
    *,
    steps: Annotated[
        int | None,
        flags.whole("--steps", "The new total of each agent's environment steps; else the run's own."),
    ] = None,
    gpu: flags.RunGpus = None,
    empty_buffer: Annotated[
        bool,
        flags.option("--empty-buffer", "Go on with an empty buffer; one that lies there is put aside."),
    ] = False,
    max_restarts: flags.MaxRestarts = None,
    stdin_is_leash: flags.Leash = False,
) -> None:
    """Goes on with a run that was stopped, was killed or has finished, in its own folder.

    A run in one process (--lockstep, --stack) goes on bit for bit as if there had been no break.
    """
    from dase_grpc.launch.resume import ResumeOptions, resume_here

    resume_here(
        ResumeOptions(
            run,
            steps,
            gpus=gpu,
            empty_buffer=empty_buffer,
            command=sys.argv,
            stdin_is_leash=stdin_is_leash,
            max_restarts=max_restarts,
        )
    )


@app.command()
def verify(run: flags.RunArgument) -> None:
    """Checks every file of a run and says what can be resumed.

    Exits with 0 if all is sound, with 1 if something is damaged, with 2 if nothing can be resumed.
    """
    from rich.console import Console

    from dase_grpc.launch.checks import verify_here

    raise typer.Exit(verify_here(run, Console()))


@app.command()
@flags.configured()
def drill(
    settings: RunConfig,
    *,
    rounds: Annotated[int, flags.option("--rounds", "How often each fault comes; else once.", min=1)] = 1,
    folder: Annotated[
        Path | None,
        flags.option("--dir", "A new folder for buffer, checkpoints and logs; else a temporary one."),
    ] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Breaks a local cluster of these settings: kills each node, freezes one, cuts the network.

    Prints what recovered in how many seconds, and whether the buffer lost anything. Exits with 0 if all
    recovered and nothing is lost. About 90 seconds with two agents.
    """
    from dase_grpc.launch.drill.drill import DrillOptions, drill_here

    seed = settings.train.seed
    raise typer.Exit(drill_here(DrillOptions(settings, folder, rounds=rounds, seed=seed, as_json=as_json)))


@app.command("config")
@flags.configured("steps")
def show_config(settings: RunConfig) -> None:
    """Prints the resolved configuration as TOML."""
    import tomli_w

    typer.echo(tomli_w.dumps(settings.model_dump(mode="json")), nl=False)


@app.command()
def evaluate(
    target: flags.PoliciesArgument,
    *,
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="Episodes per agent.")] = 10,
    seed: Annotated[
        int | None, flags.option("--seed", "Seed of the first episode; else that of training.")
    ] = None,
    best: Annotated[
        bool,
        flags.option(
            "--best",
            "Each agent's best checkpoint instead of its latest, in other episodes than it was chosen by.",
        ),
    ] = False,
    video: Annotated[
        Path | None, flags.option("--video", "Film the best agent's first episode (.mp4 or .gif).")
    ] = None,
    agent: Annotated[
        str | None,
        flags.option(
            "--agent",
            "This agent alone, the best (chosen by other episodes than these), or the ensemble, which acts "
            "by all critics; else all.",
            metavar="N|best|ensemble",
        ),
    ] = None,
) -> None:
    """Evaluates the latest checkpoints of a run, or one checkpoint, without noise."""
    from dase_grpc.launch.evaluate import agent_choice, evaluate_checkpoint, note_on_film

    chosen = None if agent is None else agent_choice(agent)
    results = evaluate_checkpoint(target, episodes=episodes, seed=seed, video=video, best=best, agent=chosen)
    for result in results:
        typer.echo(str(result))
    if note := note_on_film(results):
        typer.echo(note)


@app.command()
def export(
    target: flags.PoliciesArgument,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="What to write: FILE.onnx or FILE.pt.")],
    *,
    agent: Annotated[
        str, flags.option("--agent", "Whose policy; else the best's.", metavar="N|best")
    ] = "best",
) -> None:
    """Writes a trained policy as one ONNX (.onnx) or TorchScript (.pt) file, for use without DASE."""
    from dase_grpc.launch.evaluate import agent_choice
    from dase_grpc.launch.export import export_policy

    export_policy(target, out, agent=agent_choice(agent), say=typer.echo)


app.command("serve")(serve)


@app.command()
def report(run: flags.RunArgument) -> None:
    """Writes RUN/report.html: learning curves, similarity, throughput."""
    from dase_grpc.runs.directory import RunDirectory
    from dase_grpc.runs.reports.report import write_report

    typer.echo(write_report(RunDirectory.open(run)))


@app.command()
def compare(
    paths: flags.RunsArgument,
    *,
    out: Annotated[Path, flags.option("--out", "Where the files go; else comparison.")] = Path("comparison"),
    unfinished: Annotated[
        bool, flags.option("--unfinished", "Use runs that have not finished, up to where they are.")
    ] = False,
) -> None:
    """Compares runs over their seeds: statistics, learning curves, published numbers beside them."""
    from rich.console import Console

    from dase_grpc.launch.console import compare_here

    compare_here(paths, out, unfinished=unfinished, console=Console(), warnings=Console(stderr=True))


@app.command()
def doctor(
    *,
    runs: Annotated[Path, flags.option("--runs", "Where runs are to be kept; else runs.")] = Path("runs"),
    as_json: flags.AsJson = False,
) -> None:
    """Says what this machine can do, what will fail on it, and what helps."""
    from rich.console import Console

    from dase_grpc.launch.doctor import doctor_here

    raise typer.Exit(doctor_here(runs, Console(), as_json=as_json))


@app.command("check-env")
def check_env(
    env: Annotated[str, typer.Argument(metavar="ID", help="An environment, as for --env.")],
    *,
    settings: Annotated[
        list[str] | None,
        flags.option("--set", "Settings of env, as env.kwargs={length=30}.", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    """Tries an environment by every rule that training holds it to, and says what it found."""
    from rich.console import Console

    from dase_grpc.launch.env_check import check_env_here

    raise typer.Exit(check_env_here(env, settings or [], Console()))


@app.command()
def version() -> None:
    """Prints the version."""
    typer.echo(dase_grpc.__version__)


def main() -> None:
    """Runs the command line; errors of ours become one sentence and an exit code."""
    try:
        flags.require_values(sys.argv[1:])
        app(prog_name="dase")
    except DaseError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
