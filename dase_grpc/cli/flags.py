"""The flags of the `dase` command: their names, types and help, shared by its commands."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.sections import whole_number
from dase_grpc.errors import ConfigError
from dase_grpc.process.leash import end_with_launcher
from dase_grpc.replay.security.identity import TLS_VARIABLE, TOKEN_FILE_VARIABLE, TOKENS_VARIABLE

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
ROLES: Final = ("replay", "learner", "actor", "evaluator")
"""What `dase node` starts."""


def option(flag: str, text: str, *, panel: str | None = None, **more: Any) -> Any:
    """A flag with its help, in a panel of its kind."""
    return typer.Option(flag, help=text, rich_help_panel=panel, show_default=False, **more)


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

Gpu = Annotated[int | None, option("--gpu", "CUDA device index; without it the CPU.")]
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

Role = Annotated[str, option("--role", f"{', '.join(ROLES[:-1])} or {ROLES[-1]}.", callback=_role)]
RunId = Annotated[
    str | None, option("--run-id", "The run's name; a learner without it joins whatever run it finds.")
]
MetricsPort = Annotated[
    int | None,
    option("--metrics-port", "Prometheus endpoint; 0 is off, the default.", min=0, max=65_535),
]
MetricsHost = Annotated[
    str, option("--metrics-host", "Where the Prometheus endpoint listens; else 127.0.0.1.")
]
MetricsTls = Annotated[
    Path | None,
    option(
        "--metrics-tls",
        "A folder like that of --tls, of a replay's certificate for this host: serve metrics over HTTPS, to "
        "whom its ca.crt vouches for.",
        metavar="DIR",
    ),
]
Insecure = Annotated[
    bool,
    option(
        "--insecure", "Allow plaintext beyond loopback: of the Prometheus endpoint, and of all without --tls."
    ),
]
Tls = Annotated[
    Path | None,
    option(
        "--tls",
        "A folder with ca.crt, tls.crt and tls.key: encrypt, and show who this node is (docs/security.md).",
        envvar=TLS_VARIABLE,
        metavar="DIR",
    ),
]


def _heeded(given: bool) -> bool:
    """Heeds the leash from now on, for a command may take seconds until it does."""
    end_with_launcher(stdin_is_leash=given)
    return given


Leash = Annotated[bool, typer.Option("--stdin-is-leash", hidden=True, is_eager=True, callback=_heeded)]

REPLAY_NODE: Final = "Replay node"
Listen = Annotated[
    str | None,
    option(
        "--listen",
        f"Where to listen, else {DEFAULT_ADDRESS}; port 0 is any.",
        panel=REPLAY_NODE,
        metavar="HOST:PORT",
    ),
]
Capacity = Annotated[
    str | None,
    option("--capacity", 'Transitions kept, else 1000000; or a size such as "512MiB".', panel=REPLAY_NODE),
]
MinSize = Annotated[
    int | None,
    option("--min-size", "Transitions present before batches are served, else 1.", panel=REPLAY_NODE, min=1),
]
DataDir = Annotated[
    Path | None,
    option(
        "--data-dir",
        "Keep the buffer there, so that it outlives the process; else in memory.",
        panel=REPLAY_NODE,
        metavar="DIR",
    ),
]
SyncEvery = Annotated[
    float | None,
    option(
        "--sync-every",
        "With --data-dir, seconds between writes to the disk, the bound on what a power loss takes; else 5.",
        panel=REPLAY_NODE,
        metavar="SECONDS",
    ),
]

Tokens = Annotated[
    Path | None,
    option(
        "--tokens",
        "With --tls, a file or folder of tokens; nodes then show a token instead of a certificate.",
        panel=REPLAY_NODE,
        envvar=TOKENS_VARIABLE,
        metavar="FILE",
    ),
]
Shard = Annotated[
    str | None,
    option(
        "--shard",
        "Which part of a sharded replay this is, e.g. 0/2 and 1/2 (docs/sharding.md); else all of it.",
        panel=REPLAY_NODE,
        metavar="INDEX/COUNT",
    ),
]

LEARNER_NODE: Final = "Learner node"
Replay = Annotated[
    str | None,
    option(
        "--replay",
        f"The replay's address, else {DEFAULT_ADDRESS}; of a sharded one those of all shards, with commas "
        "between them, or dns:NAME:PORT for a name that resolves to them.",
        panel=LEARNER_NODE,
        metavar="HOST:PORT",
    ),
]
ReplayTimeout = Annotated[
    float | None,
    option(
        "--replay-timeout",
        "How long the replay, or the learner of an actor, may be away before the node ends; else 600.",
        panel=LEARNER_NODE,
        metavar="SECONDS",
    ),
]
TokenFile = Annotated[
    Path | None,
    option(
        "--token-file",
        "This node's token, with a --tls folder that needs ca.crt only.",
        panel=LEARNER_NODE,
        envvar=TOKEN_FILE_VARIABLE,
        metavar="FILE",
    ),
]
ACTOR_NODE: Final = "Actor node"
Envs = Annotated[
    int | None,
    option("--envs", "Environments to step in turn, else 1.", panel=ACTOR_NODE, min=1, max=1_024),
]
AgentIds = Annotated[
    list[int] | None,
    option(
        "--agent",
        "The agent id to take, else the next free one; an actor's agent; an evaluator's, else all (may be "
        "repeated).",
        panel=LEARNER_NODE,
        min=0,
    ),
]
RunDir = Annotated[
    Path | None, option("--run-dir", "Where results go; else runs/RUN_ID.", panel=LEARNER_NODE)
]
Resume = Annotated[
    bool, option("--resume", "Go on from the agent's last checkpoint in --run-dir.", panel=LEARNER_NODE)
]
UnfinishedCode = Annotated[
    int | None,
    option(
        "--unfinished-code",
        "The exit code when it is stopped before its last step, for schedulers that take 0 for done; else 0.",
        panel=LEARNER_NODE,
        min=0,
        max=255,
    ),
]


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


def one_agent(agents: Sequence[int] | None, role: str) -> int | None:
    """The agent of a node that is of one agent; None where none was given."""
    if agents and len(agents) > 1:
        raise ConfigError(f"--agent is given {len(agents)} times, and a {role} is of one agent; give it once")
    return agents[0] if agents else None


def refuse(flags: Mapping[str, object], role: str) -> None:
    """Refuses flags that mean nothing to this role, rather than ignoring them."""
    for flag, value in flags.items():
        if value is not None:
            raise ConfigError(f"--{flag} is not for --role {role}; leave it out, or start the node it is for")
