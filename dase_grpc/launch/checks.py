"""Checks before a run begins, of what only the environment and the machine at hand can tell."""

import sys
from collections.abc import Callable

from dase_grpc.config.resolve import RunConfig, require_capacity
from dase_grpc.config.sections import EnvConfig
from dase_grpc.config.texts import transitions
from dase_grpc.errors import ConfigError, EnvironmentHangsError
from dase_grpc.learning.envs.probe import tried_out
from dase_grpc.process.ends import end_now
from dase_grpc.process.watchdog import Watch, say_where, watchdog
from dase_grpc.schema import TransitionSchema


def check(config: RunConfig, *, gpu: int | None = None, starts_actors: bool = False) -> TransitionSchema:
    """Checks what can only be known with the environment and the machine at hand; returns the layout.

    `starts_actors` says whether the caller starts the actors that the settings ask for.

    Raises:
        DeviceError: there is no such GPU, or no agent can compute there as the settings say.
        EnvironmentSpecError: the environment cannot be made, or no agent here can act in it.
        ConfigError: a capacity in bytes holds too few of its transitions.
    """
    if not config.train.explore and not starts_actors:
        raise ConfigError(
            "train.explore = false leaves exploring to actor nodes, which neither --lockstep, --stack nor "
            "dase drill starts; leave it out"
        )
    if not config.train.explore and not config.train.actors:
        raise ConfigError(
            "train.explore = false leaves exploring to actor nodes; have them started with --actors N, or "
            "start each node with dase node (docs/roles.md)"
        )
    check_device(config, gpu)
    schema = probed(config.env)
    check_capacity(config, schema)
    return schema


def check_device(config: RunConfig, gpu: int | None = None) -> None:
    """Checks that the device can compute what the agents are to.

    Raises:
        DeviceError: there is no such GPU, or it or this CPU has no products of the kind asked for.
    """
    if gpu is not None or any(agent.products != "float32" for agent in config.distinct_agents):
        from dase_grpc.learning.agents.device import pick_device  # torch takes seconds to import

        pick_device(gpu, config.distinct_agents)


def vain_products(config: RunConfig) -> str | None:
    """Says that agents ask for products of bfloat16 numbers and have none; None where all is well."""
    for agent in config.distinct_agents:
        if agent.products != "float32":
            from dase_grpc.learning.agents.dense import WORTH_ROUNDING  # torch takes seconds to import

            if max(agent.hidden) < WORTH_ROUNDING:
                return (
                    f"agent.products = {agent.products} changes nothing in layers of fewer than "
                    f"{WORTH_ROUNDING} units, and agent.hidden = {list(agent.hidden)} has no others"
                )
    return None


def require_stackable(config: RunConfig) -> None:
    """Checks that the agents of a run can be updated at once.

    Raises:
        ConfigError: they are not of one kind, or do not learn from the shared buffer alone.
    """
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

    Raises:
        EnvironmentSpecError: the environment cannot be made, or no agent here can act in it.
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
    """Checks the buffer's size, now that that of a transition is known.

    Raises:
        ConfigError: a capacity in bytes holds too few transitions.
    """
    try:
        require_capacity(config, transitions(config.replay.capacity, row_bytes=schema.row_bytes))
    except ValueError as error:
        raise ConfigError(str(error)) from None
