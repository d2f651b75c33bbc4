"""`dase drill`: breaks a local cluster in every way it should survive, and says what recovered how fast."""

import asyncio
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.errors import NodeFailedError, RunDirectoryError
from dase_grpc.launch.checks import check
from dase_grpc.launch.console import PatientConsole, say
from dase_grpc.launch.drill.cluster import DrillCluster, open_cluster
from dase_grpc.launch.drill.evidence import problems, read_buffer, read_ledger
from dase_grpc.launch.drill.faults import Fault, FaultOutcome, one_round, strike
from dase_grpc.launch.processes import PROGRAM
from dase_grpc.learning.envs.ids import with_resolved_id
from dase_grpc.learning.envs.make import close_env, make_env
from dase_grpc.process.lifecycle import stop_event
from dase_grpc.process.tasks import first_cause, unless
from dase_grpc.progress import several
from dase_grpc.runs.files import written

PAUSE_S: Final = 0.002
"""How long each step of the environment waits, so that the processes of a drill do not starve each other."""

CAPACITY: Final = 200_000
START_STEPS: Final = 100
CHECKPOINT_EVERY: Final = 500
NEVER: Final = 1_000_000_000
START_AND_CHECK_S: Final = 15
EACH_ROUND_S: Final = 45
EACH_KILLED_LEARNER_S: Final = 15
"""What a drill takes on two cores: most of it is waiting for leases to end and for processes to start."""

STOPPED_CODE: Final = 130
"""What shells give to a Ctrl-C."""


@dataclass(frozen=True)
class DrillOptions:
    """What `dase drill` is told; `path` None is a temporary folder."""

    config: RunConfig
    path: Path | None = None
    rounds: int = 1
    seed: int = 0
    as_json: bool = False
    program: Sequence[str] = PROGRAM


@dataclass
class DrillResult:
    """What came of each fault of a drill, and what the buffer holds at the end.

    `problems` are what is wrong with the buffer, None before it was looked at; `stopped` is by a signal.
    """

    outcomes: list[FaultOutcome] = field(default_factory=list)
    transitions: int = 0
    processes: int = 0
    problems: list[str] | None = None
    stopped: bool = False

    @property
    def good(self) -> bool:
        """Whether all recovered and nothing is lost."""
        return self.problems == [] and not self.failed

    @property
    def failed(self) -> bool:
        """Whether anything is known that went wrong."""
        return bool(self.problems) or any(each.recovered_s is None for each in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON has it."""
        return {
            "good": self.good,
            "faults": [asdict(outcome) for outcome in self.outcomes],
            "transitions": self.transitions,
            "learner_processes": self.processes,
            "problems": self.problems,
            "stopped": self.stopped,
        }


def drill_here(options: DrillOptions) -> int:
    """Runs a drill on this machine and prints what came of it; no process is left.

    Returns 0 if all recovered and the buffer holds exactly what was acknowledged, 130 if a signal stopped
    it before that was known, else 1.

    Raises:
        UsageError: before any process starts, when the environment or the settings cannot be used.
        NodeFailedError, UnreachableError: the cluster did not come to train at all.
    """
    console = PatientConsole(stderr=options.as_json)
    config = with_resolved_id(options.config)
    if options.path is not None and options.path.exists():
        raise RunDirectoryError(f"{options.path} exists; choose another --dir for the drill")
    path = (options.path or Path(tempfile.mkdtemp(prefix="dase-drill-"))).absolute()
    with written(f"the drill's folder {path}"):
        path.mkdir(parents=True, exist_ok=True)
    result = DrillResult()
    try:
        config = drill_config(config, path)
        check(config)
        plan = faults_of(config, rounds=options.rounds, seed=options.seed)
        kept, agents = " (kept if it fails)" if options.path is None else "", config.train.agents
        what = f"{several(agents, 'learner')} and a durable replay, {several(len(plan), 'fault')}"
        lasts = f"{expected(agents, options.rounds)}; logs: {path / 'logs'}{kept}"
        say(console, f"drill on {options.config.env.id}: {what}, {lasts}")
        ready = replace(options, config=config)
        result = asyncio.run(run_drill(ready, path, plan, lambda outcome: say(console, sentence(outcome))))
        _show(result, console, faults=len(plan))
    finally:
        _tidy(path, result, console, temporary=options.path is None)
    if options.as_json:
        Console().print_json(json.dumps(result.to_json()))
    return STOPPED_CODE if result.stopped else 0 if result.good else 1


def _tidy(path: Path, result: DrillResult, console: Console, *, temporary: bool) -> None:
    """Removes a temporary folder, unless it says why a drill failed, and one to which nothing came."""
    failed = result.failed or not (result.good or result.stopped)
    if (path / "logs").exists() and (failed or (result.stopped and not temporary)):
        say(console, f"logs, buffer and checkpoints are kept in {path}")
    elif temporary or not any(path.iterdir()):
        shutil.rmtree(path)


def expected(agents: int, rounds: int) -> str:
    """About how long a drill takes."""
    seconds = START_AND_CHECK_S + rounds * (EACH_ROUND_S + EACH_KILLED_LEARNER_S * agents)
    return f"about {seconds} s" if seconds < 120 else f"about {round(seconds / 60)} min"


def drill_config(config: RunConfig, path: Path) -> RunConfig:
    """A run's settings, made ready for a drill: its steps numbered, its start short, its end far.

    Transitions are of single steps, since what numbers and sums up each is in the observation after it.
    """
    settings, capacity = config.model_dump(mode="json"), config.replay.capacity
    for agent in (settings["agent"], *settings["members"]):
        agent["start_steps"], agent["n_step"] = min(agent["start_steps"], START_STEPS), 1
    changes = {
        "env": {
            "id": "dase_grpc.launch.drill.evidence:Numbered",
            "kwargs": {
                "env_id": config.env.id,
                "kwargs": config.env.kwargs,
                "ledger": str(path / "ledger"),
                "pause_s": PAUSE_S,
            },
        },
        "train": {"steps": NEVER, "checkpoint_every": CHECKPOINT_EVERY},
        "replay": {
            "capacity": min(capacity, CAPACITY) if isinstance(capacity, int) else capacity,
            "min_size": min(config.replay.min_size, START_STEPS),
        },
        "eval": {"every": NEVER},
        "metrics": {"port": 0},
    }
    settings["env"] = {}
    return resolve(settings, changes)


def faults_of(config: RunConfig, *, rounds: int, seed: int) -> list[Fault]:
    """The faults of a drill, drawn from its seed."""
    rng = random.Random(seed)
    agents = range(config.train.agents)
    return [fault for _ in range(rounds) for fault in one_round(agents, rng)]


async def run_drill(
    options: DrillOptions, path: Path, plan: Sequence[Fault], tell: Callable[[FaultOutcome], None]
) -> DrillResult:
    """Runs a cluster in the folder `path`, lets the faults happen to it, stops it and checks its buffer.

    The configuration is one that `drill_config` has made ready. `tell` gets each outcome when it is known.
    Ends early after the first fault that nothing recovered from, and on a signal; no process is left.
    """
    result, rng = DrillResult(), random.Random(options.seed)

    async def drill() -> bool:
        async with open_cluster(options.config, path, program=options.program) as cluster:
            for fault in plan:
                outcome = await strike(cluster, fault, rng)
                result.outcomes.append(outcome)
                tell(outcome)
                if outcome.recovered_s is None:
                    break
            await _examine(cluster, result)
        return True

    async with stop_event(stdin_is_leash=False) as stop:
        with first_cause():
            result.stopped = await unless(stop, drill()) is None
    return result


async def _examine(cluster: DrillCluster, result: DrillResult) -> None:
    """Stops the cluster and compares its buffer with what is known of its learners."""
    found: list[str] = []
    try:
        await cluster.stop()
    except NodeFailedError as error:
        found.append(str(error))
    ledger = read_ledger(cluster.path / "ledger")
    stored = await asyncio.to_thread(read_buffer, cluster.data_dir, agents=cluster.config.train.agents)
    env = make_env(cluster.config.env.id, cluster.config.env.kwargs)
    try:
        found += await asyncio.to_thread(problems, stored, cluster.lives, ledger, env)
    finally:
        close_env(env, owner="the drill")
    result.problems, result.transitions, result.processes = found, stored.total, len(cluster.lives)


def sentence(outcome: FaultOutcome) -> str:
    """A fault and what came of it, in one line."""
    who = "agent" if len(outcome.agents) == 1 else "agents"
    names = ", ".join(map(str, outcome.agents))
    lasted = f" for {outcome.lasted_s:.1f} s" if outcome.lasted_s else ""
    if outcome.recovered_s is None:
        return f"{outcome.kind} ({who} {names}{lasted}): did not recover: {outcome.note}"
    note = f"; {outcome.note}" if outcome.note else ""
    return (
        f"{outcome.kind} ({who} {names}{lasted}): trains again {outcome.recovered_s:.1f} s after the "
        f"{outcome.clock_from}{note}"
    )


def _show(result: DrillResult, console: Console, *, faults: int) -> None:
    if result.outcomes:
        console.print(_table(result.outcomes))
    for problem in result.problems or []:
        say(console, f"problem: {problem}")
    if result.problems == []:
        processes = several(result.processes, "learner process", "learner processes")
        say(
            console,
            f"the buffer holds what {processes} stored: {several(result.transitions, 'transition')}, "
            f"each once, whole and in order, none that was acknowledged missing",
        )
    if result.stopped:
        say(console, _stopped(result.outcomes, faults))
    else:
        say(console, "all recovered, nothing is lost" if result.good else "the drill FAILED")


def _table(outcomes: Sequence[FaultOutcome]) -> Table:
    table = Table("fault", "agents", "lasted", "recovered", "seconds", "counted from the")
    for each in outcomes:
        recovered = each.recovered_s is not None
        table.add_row(
            each.kind,
            ", ".join(map(str, each.agents)),
            f"{each.lasted_s:.1f} s" if each.lasted_s else "",
            "yes" if recovered else "NO",
            f"{each.recovered_s:.1f}" if recovered else "",
            each.clock_from,
        )
    return table


def _stopped(outcomes: Sequence[FaultOutcome], faults: int) -> str:
    """What a drill that was stopped has found out."""
    if not outcomes:
        return f"the drill was stopped before the first of {faults} faults"
    recovered = sum(each.recovered_s is not None for each in outcomes)
    told = "all recovered" if recovered == len(outcomes) else f"{recovered} recovered"
    return (
        f"the drill was stopped after {len(outcomes)} of {faults} faults: {told}; the buffer was not checked"
    )
