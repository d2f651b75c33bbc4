"""Checks before a run begins or goes on: of environment, device and buffer; and `dase verify`."""

import sys
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dase_grpc.config.algorithms import is_own
from dase_grpc.config.gpus import Gpus
from dase_grpc.config.resolve import RunConfig, require_capacity
from dase_grpc.config.sections import EnvConfig
from dase_grpc.config.texts import transitions
from dase_grpc.errors import (
    ConfigError,
    DataDirectoryError,
    EnvironmentHangsError,
    RunDirectoryError,
)
from dase_grpc.launch.console import say
from dase_grpc.launch.room import require_networks
from dase_grpc.learning.envs.make import tried_out
from dase_grpc.process.ends import boot_id, end_now
from dase_grpc.process.watchdog import Watch, say_where, watchdog
from dase_grpc.progress import several
from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import inspect
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.schema import TransitionSchema

ASIDE: Final = "replay-before-resume"

BEGIN_EMPTY: Final = (
    "with --empty-buffer the agents go on with an empty one, each without an update until it has stored "
    "agent.start_steps new transitions"
)
"""What `dase resume` offers where the buffer cannot be gone on with."""


# -- settings, device and environment -----------------------------------------------------------------


class Checks:
    """What can only be known of runs with the environment and the machine at hand.

    What several runs have in common is tried out once. `gpus` are those that the runs are given; `here` says
    whether they are to be on this machine.
    """

    def __init__(self, gpus: Gpus | None = None, *, here: bool = True) -> None:
        self._gpus = gpus
        self._here = here
        self._schemas: dict[str, TransitionSchema] = {}
        self._tried: set[Hashable] = set()

    def check(
        self, config: RunConfig, *, starts_actors: bool = False, stacked: bool = False
    ) -> TransitionSchema:
        """Checks a run; returns the layout of its transitions.

        `starts_actors` says whether the caller starts the actors that the settings ask for, `stacked` whether
        the agents are updated at once.

        Raises:
            UsageError: the device, the environment, an algorithm, a measure or a capacity in bytes does not
                go together with the settings, or the networks find no room.
        """
        require_actors(config, starts_actors=starts_actors)
        check_devices(config, self._gpus)
        schema = self._layout(config.env)
        check_capacity(config, schema)
        if self._here:
            require_networks(config, schema, gpus=self._gpus)
        self._once(partial(check_measure, config, schema), config.dps, config.train.agents, schema)
        asked = (config.train.method, config.train.cuda_graph, config.replay.sampling, config.dps.measure)
        check = partial(check_algorithms, config, schema, gpus=self._gpus, stacked=stacked)
        self._once(check, config.distinct_agents, asked, stacked, schema)
        return schema

    def _layout(self, env: EnvConfig) -> TransitionSchema:
        key = env.model_dump_json()
        if key not in self._schemas:
            self._schemas[key] = probed(env)
        return self._schemas[key]

    def _once(self, look: Callable[[], None], *depends_on: Hashable) -> None:
        """Has a look, unless it was had already with all that its outcome depends on."""
        if depends_on not in self._tried:
            look()
            self._tried.add(depends_on)


def check(
    config: RunConfig, *, gpus: Gpus | None = None, starts_actors: bool = False, stacked: bool = False
) -> TransitionSchema:
    """Checks one run that is to be on this machine, as `Checks.check` does."""
    return Checks(gpus).check(config, starts_actors=starts_actors, stacked=stacked)


def require_actors(config: RunConfig, *, starts_actors: bool) -> None:
    """Checks that somebody explores."""
    if config.train.explore or (starts_actors and config.train.actors):
        return
    told = (
        "; have them started with --actors N or train.actors = N, or start each node with dase node "
        "(docs/roles.md)"
        if starts_actors
        else ", which neither --lockstep, --stack nor dase drill starts; leave it out"
    )
    raise ConfigError(f"train.explore = false leaves exploring to actor nodes{told}")


def check_devices(config: RunConfig, gpus: Gpus | None = None) -> tuple[int, ...]:
    """Checks that the devices can compute what the agents are to; the GPUs' indices, none for the CPU."""
    if gpus is None and all(agent.products == "float32" for agent in config.distinct_agents):
        return ()
    from dase_grpc.learning.agents.device import gpu_indices, pick_device  # torch takes seconds to import

    indices = () if gpus is None else gpu_indices(gpus)
    for index in indices or (None,):
        pick_device(index, config.distinct_agents)
    return indices


def require_one_gpu(gpus: Gpus | None) -> None:
    """Checks that a run in one process is given no more than one GPU, by its index."""
    if gpus is not None and gpus.only is None:
        raise ConfigError(
            f"--gpu {gpus} is for learners with processes of their own; a run in one process (lockstep, "
            f"stack) trains on one GPU, so name one"
        )


def check_measure(config: RunConfig, schema: TransitionSchema) -> None:
    """Tries out a measure of the user's, with made-up batches."""
    if is_own(config.dps.measure):
        from dase_grpc.learning.similarity.measured import try_out  # torch takes seconds to import

        try_out(config.dps, schema, agents=config.train.agents)


def check_algorithms(
    config: RunConfig, schema: TransitionSchema, *, gpus: Gpus | None, stacked: bool
) -> None:
    """Tries out algorithms of the user's, with made-up batches."""
    if any(map(is_own, config.algorithms)):
        from dase_grpc.learning.agents.promises import try_out_agents  # torch takes seconds to import

        try_out_agents(config, schema, stacked=stacked, on_cpu=gpus is None)


def vain_products(config: RunConfig) -> str | None:
    """Says that agents ask for products of bfloat16 numbers and have none; None where all is well."""
    for agent in config.distinct_agents:
        if agent.products != "float32":
            from dase_grpc.learning.agents.passes import WORTH_ROUNDING  # torch takes seconds to import

            if max(agent.hidden) < WORTH_ROUNDING:
                return (
                    f"agent.products = {agent.products} changes nothing in layers of fewer than "
                    f"{WORTH_ROUNDING} units, and agent.hidden = {list(agent.hidden)} has no others"
                )
    return None


def require_stackable(config: RunConfig) -> None:
    """Checks that the agents of a run can be updated at once."""
    if config.method == "dpd":
        raise ConfigError(
            "--stack updates all agents at once from the shared buffer, and with --method dpd each also "
            "distils its peer's policy; leave --stack out"
        )
    first, *others = (config.for_agent(agent_id).agent for agent_id in range(config.train.agents))
    if any(other != first for other in others):
        raise ConfigError(
            f"--stack updates all agents at once, so all have to be alike, and these are of several "
            f"algorithms or settings ({', '.join(config.algorithms)}); leave --stack out"
        )
    if first.products != "float32":
        raise ConfigError(
            f"--stack updates by float32 products, and agent.products = {first.products} is for updates of "
            f"one agent; leave one of the two out"
        )


def probed(config: EnvConfig) -> TransitionSchema:
    """Tries the environment out; what its transitions look like.

    A call that does not return within `env.timeout_s` ends the process, with one sentence.
    """
    watch = Watch("trying it out before the run")
    with watchdog([watch], timeout_s=config.timeout_s, on_hang=end_hanging):
        return tried_out(config, watch)


def end_hanging(
    watch: Watch, error: EnvironmentHangsError, *, tidy: Callable[[], object] = lambda: None
) -> None:
    """Ends this process, in which an environment hangs; says where first, and calls `tidy`."""
    say_where(watch)
    tidy()
    sys.stderr.write(f"error: {error}\n")
    end_now(error.exit_code)


def check_capacity(config: RunConfig, schema: TransitionSchema) -> None:
    """Checks the buffer's size, now that that of a transition is known."""
    try:
        require_capacity(config, transitions(config.replay.capacity, row_bytes=schema.row_bytes))
    except ValueError as error:
        raise ConfigError(str(error)) from None


# -- what a run has kept ------------------------------------------------------------------------------


def has_buffer(directory: RunDirectory) -> bool:
    """Whether a run's buffer lies in its directory, whole, and no replay works on it."""
    if not directory.replay.exists():
        return False
    _require_unused(directory.replay)
    try:
        return inspect(directory.replay, boot_id=boot_id(), to_go_on=True) is not None
    except DataDirectoryError as error:
        raise DataDirectoryError(f"{_cause(error)}; {BEGIN_EMPTY}") from None


def put_buffer_aside(directory: RunDirectory) -> Path | None:
    """Moves what the replay has kept out of the way, so that the next one begins with nothing.

    Returns where it lies now; None where there was nothing.
    """
    if not directory.replay.exists():
        return None
    _require_unused(directory.replay)
    taken = {path.name for path in directory.path.glob(f"{ASIDE}-*")}
    number = next(each for each in range(1, len(taken) + 2) if f"{ASIDE}-{each}" not in taken)
    aside = directory.path / f"{ASIDE}-{number}"
    try:
        directory.replay.rename(aside)
    except OSError as error:
        raise RunDirectoryError(f"cannot move {directory.replay} to {aside}: {error.strerror}") from None
    return aside


def _require_unused(folder: Path) -> None:
    """Checks that no replay works on a buffer, and that the folder can be written."""
    try:
        DataDirectory.open(folder).close()
    except DataDirectoryError as error:
        raise DataDirectoryError(
            f"{_cause(error)}; end what works on it, and see that you may write there"
        ) from None


def _cause(error: DataDirectoryError) -> str:
    """What a sentence says is wrong, without the remedy for those who start a replay by hand."""
    return str(error).partition("; ")[0]


def verify_here(path: Path, console: Console) -> int:
    """`dase verify`: prints a table of the run's files and what can be resumed.

    Returns 0 if all is sound, 1 if something is damaged, 2 if nothing can be resumed.
    """
    from dase_grpc.runs.verify import verify  # torch takes seconds to import

    found = verify(path, kept_buffer=_kept_buffer)
    table = Table("file", "holds", "is")
    for each in found.findings:
        state = Text("sound") if each.problem is None else Text("damaged", style="bold red")
        table.add_row(Text(str(each.path.relative_to(path))), Text(each.content), state)
    console.print(table)
    for each in found.damaged:
        say(console, f"damaged: {each.problem}")
    if found.resumable is None:
        say(console, f"cannot be resumed: {found.reason}")
        return 2
    say(console, f"can be resumed: {found.resumable}")
    return 1 if found.damaged else 0


def _kept_buffer(folder: Path) -> str | None:
    """What a replay's data directory holds; None where there is none."""
    state = inspect(folder, boot_id=boot_id())
    if state is None:
        return None
    told = f"buffer, {several(state.transitions, 'transition')} of {several(state.writers, 'writer')}"
    why = "as of the last sync, since the machine has stopped or the disk refused"
    return f"{told} {why}" if state.machine_stopped else told
