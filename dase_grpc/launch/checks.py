"""What can only be known with the environment and the machine at hand, checked before a run begins."""

from dase_grpc.capacity import transitions
from dase_grpc.config import EnvConfig, RunConfig, require_capacity
from dase_grpc.errors import ConfigError
from dase_grpc.learning.env_probe import probe
from dase_grpc.learning.envs import make_env, schema_of
from dase_grpc.schema import TransitionSchema


def check(config: RunConfig, *, gpu: int | None = None) -> TransitionSchema:
    """Checks what can only be known with the environment and the machine at hand; returns the layout.

    Raises:
        DeviceError: there is no such GPU.
        EnvironmentSpecError: the environment cannot be made, or no agent here can act in it.
        ConfigError: a capacity in bytes holds too few of its transitions.
    """
    if gpu is not None:
        from dase_grpc.learning.device import pick_device  # torch takes seconds to import

        pick_device(gpu)
    schema = probed(config.env)
    check_capacity(config, schema)
    return schema


def probed(config: EnvConfig) -> TransitionSchema:
    """Tries the environment out; what its transitions look like.

    Raises:
        EnvironmentSpecError: the environment cannot be made, or no agent here can act in it.
    """
    env = make_env(config.id, config.kwargs)
    try:
        schema = schema_of(env, config.id)
        probe(env)
    finally:
        env.close()
    return schema


def check_capacity(config: RunConfig, schema: TransitionSchema) -> None:
    """Checks the buffer's size, now that that of a transition is known.

    Raises:
        ConfigError: a capacity in bytes holds too few transitions.
    """
    try:
        require_capacity(config, transitions(config.replay.capacity, row_bytes=schema.row_bytes))
    except ValueError as error:
        raise ConfigError(str(error)) from None
