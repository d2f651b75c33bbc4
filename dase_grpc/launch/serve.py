"""`dase serve`: a policy server for a run's policy or a file that `dase export` wrote.

A file needs neither its run nor its environment, and one in ONNX no torch.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from dase_grpc.errors import ConfigError, DivergedError, MalformedError, UsageError
from dase_grpc.inference.service import Act, Batcher, BatchLimits, InferenceServicer
from dase_grpc.inference.v1 import inference_pb2, inference_pb2_grpc
from dase_grpc.inference.wire import Actions, PolicyDescription, rows_in_a_message
from dase_grpc.learning.agents.model_files import READERS, as_usage
from dase_grpc.metrics.calls import Calls, CallsCollector
from dase_grpc.metrics.endpoint import loop_lag, make_registry
from dase_grpc.metrics.inference import ROLE, BatchCounts, InferenceCollector
from dase_grpc.nodes.listener import Announce, Listener, listener_main
from dase_grpc.nodes.policy_options import PolicyOptions
from dase_grpc.process.tasks import watch_loop_lag
from dase_grpc.progress import several
from dase_grpc.replay.service.server import make_server
from dase_grpc.runs.files import require_utf8

SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]

log = logging.getLogger("dase")


@dataclass(frozen=True)
class ServedPolicy:
    """A policy in the environment's units, and what is told of it."""

    act: Act
    description: PolicyDescription


def _as_they_are(actions: Actions) -> Actions:
    return actions


def serve_here(target: Path, agent: str | None, options: PolicyOptions, *, stdin_is_leash: bool) -> int:
    """Runs a policy server as a process; prints its address on stdout once it answers.

    Before the policy is loaded it refuses addresses and credentials that cannot be used; beside that it
    raises as `served_policy`.
    """
    listener = Listener.of(options)
    listener.require_free()
    policy = served_policy(target, agent)
    told = policy.description
    about = f"{told.agent} in {told.environment} after {several(told.step, 'step')}"
    return listener_main(
        "policy", partial(run_policy, listener, policy), about, stdin_is_leash=stdin_is_leash
    )


async def run_policy(
    listener: Listener[PolicyOptions], policy: ServedPolicy, stop: asyncio.Event, announce: Announce
) -> None:
    """Answers until `stop`; then refuses new calls, answers those that are open and returns.

    `announce` is called with the real address once the service answers. AddressError as `run_replay`.
    """
    options = listener.options
    calls, counts, registry = Calls(method.name for method in SERVICE.methods), BatchCounts(), make_registry()
    limits = BatchLimits(options.max_batch, options.max_delay_s, options.max_queue)
    batcher = Batcher(policy.act, limits, counts)
    server = make_server(calls, listener.door)
    told = policy.description
    told = replace(told, max_rows=min(told.max_rows, options.max_queue))
    servicer = InferenceServicer(batcher, told, calls)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    registry.register(InferenceCollector(counts, listener.door_state))
    registry.register(CallsCollector(calls, role=ROLE))
    beside = (batcher.run(), listener.watch_door(), watch_loop_lag(loop_lag(registry).observe))
    async with asyncio.TaskGroup() as tasks:
        jobs = [tasks.create_task(job) for job in beside]
        async with listener.serving(
            server, [SERVICE.full_name], registry, announce=announce, drain=servicer.drain
        ):
            await stop.wait()
        for job in jobs:
            job.cancel()
    log.info("stopped; %s answered", several(counts.rows, "observation"))


def served_policy(target: Path, agent: str | None = None) -> ServedPolicy:
    """The policy of a file, of a run's agent, or of all; `agent` as on the command line, else the best.

    Raises:
        UsageError: the file cannot be read, or an agent is chosen of one.
        RunDirectoryError, EnvironmentSpecError: as `dase evaluate`.
        DivergedError: it does not act.
    """
    if target.suffix not in READERS:
        return _of_run(target, agent or "best")
    if agent is not None:
        raise ConfigError(f"{target} holds one policy; leave --agent {agent} out")
    if not target.is_file():
        raise UsageError(f"there is no file {target}; write it with `dase export`")
    require_utf8(target, "policy")
    file = READERS[target.suffix](target)
    if "observation_size" not in file.metadata:
        raise UsageError(f"{target} does not say what it observes; write it with `dase export`")
    with as_usage(target, "the policy that its metadata describes"):
        return _served(file.act, file.metadata)


def _of_run(target: Path, agent: str) -> ServedPolicy:
    from dase_grpc.launch.evaluate import agent_choice, chosen_policy
    from dase_grpc.launch.export import policy_metadata
    from dase_grpc.learning.envs.answers import ActionMap
    from dase_grpc.learning.envs.flat import observation_shape
    from dase_grpc.learning.envs.make import borrowed_env

    choice = agent_choice(agent)
    policy, checkpoint = chosen_policy(target, choice)
    with borrowed_env(checkpoint.config.env, owner="the policy") as env:
        to_env, shape = ActionMap(env.action_space), observation_shape(env)
    return _served(policy.act, policy_metadata(checkpoint, choice, shape), to_env=to_env)


def _served(
    act: Act, told: Mapping[str, Any], *, to_env: Callable[[Actions], Actions] = _as_they_are
) -> ServedPolicy:
    """The policy, which has acted once, and its description; `to_env` brings its actions into their units."""
    first = act(np.zeros((1, told["observation_size"]), np.float32))
    if not np.isfinite(first).all():
        raise DivergedError("the policy's actions are not finite, so it cannot be served")
    first = to_env(first)
    shape = tuple(told.get("observation_shape") or [told["observation_size"]])
    if math.prod(shape) != told["observation_size"]:
        raise ValueError(f"{shape} holds another number of components than {told['observation_size']}")
    description = PolicyDescription(
        environment=told["environment"],
        observation_shape=shape,
        action_shape=first.shape[1:],
        action_dtype=first.dtype,
        action_low=tuple(told["action_low"]),
        action_high=tuple(told["action_high"]),
        max_rows=rows_in_a_message(told["observation_size"], first),
        agent=_whose(told),
        algorithm=told["algorithm"],
        step=int(told["step"]),
        score=None if told["chosen"] == "ensemble" else told.get("score"),
        commit=told.get("commit") or "",
    )
    return ServedPolicy(lambda rows: to_env(_finite(act(rows))), description)


def _finite(actions: Actions) -> Actions:
    """The same; MalformedError if one is not finite, as those for huge observations are."""
    sound = np.isfinite(actions).reshape(len(actions), -1).all(1)
    if not sound.all():
        raise MalformedError(
            f"the policy's action for observation {int(sound.argmin())} is not finite; send observations as "
            f"the environment gives them"
        )
    return actions


def _whose(told: Mapping[str, Any]) -> str:
    if told["chosen"] == "ensemble":
        return "the ensemble"
    return f"agent {told['agent']}" + (" (the best)" if told["chosen"] == "best" else "")
