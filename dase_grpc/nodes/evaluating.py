"""An evaluator's compute thread: one policy after the other, until nothing is left."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import ConfigError, DivergedError, Halted
from dase_grpc.learning.agents.device import pick_device
from dase_grpc.learning.agents.policy import policy_tensors
from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.learning.envs.evaluation import Evaluation
from dase_grpc.learning.envs.explorer import Policy as Acting
from dase_grpc.learning.envs.restarts import evaluation_env
from dase_grpc.learning.training.build import build_evaluator
from dase_grpc.learning.training.parts import StoppablePolicy
from dase_grpc.metrics.nodes import EvaluatorMetrics
from dase_grpc.nodes.due import DuePolicies
from dase_grpc.nodes.followed import unpacked
from dase_grpc.process.containment import Contained
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import Attendance, number, several
from dase_grpc.replay.buffer.policies import Policy
from dase_grpc.runs.journal import Evaluated, EvaluationJournal
from dase_grpc.schema import TransitionSchema

log = logging.getLogger("dase")


class Evaluating:
    """Evaluates the policies that are due by the run's own protocol, and writes down what comes of it.

    `run` belongs to the compute thread; `attendance` and `count` to any.

    Args:
        due: gives the policies.
        journals: those of the agents, called before the first evaluation is written, on the compute thread.
        watch: sees every call into the environments.

    Attributes:
        count: evaluations that are written down.
    """

    def __init__(
        self,
        due: DuePolicies,
        agents: Collection[int],
        *,
        config: RunConfig,
        schema: TransitionSchema,
        journals: Callable[[], Mapping[int, EvaluationJournal]],
        metrics: EvaluatorMetrics,
        watch: Watch,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._due = due
        self._config = config
        self._schema = schema
        self._journals = journals
        self._metrics = metrics
        self._watch = watch
        self._clock = clock
        make = partial(evaluation_env, config.env, watch)
        self._evaluators = {
            agent_id: build_evaluator(config, schema, agent_id=agent_id, make=make) for agent_id in agents
        }
        self._attendance = Attendance(envs=config.eval.episodes)
        self._latest: Policy | None = None  # of those evaluated
        self._busy = False
        self._began = 0.0
        self.count = 0

    def run(self, halt: threading.Event) -> None:
        """Evaluates until every agent's last policy is evaluated, `due` is closed, or `halt` is set.

        What is in hand when `halt` is set is dropped.

        Raises:
            ConfigError: a policy is of other settings.
            EnvironmentFailedError: the environment raised too often.
            RunDirectoryError: the results cannot be written.
            Exception: whatever the environment raises.
        """
        self._began = self._clock()
        with Contained(), suppress(Halted):
            while (policy := self._due.take()) is not None:
                self._busy = True
                self._evaluate(policy, halt)
                self._busy = False
                self._due.done(policy)

    def attendance(self, updates: Mapping[int, int]) -> Attendance:
        """What the evaluator is doing; `updates` says how far the learners are."""
        state = "idle: no policy is due"
        if self._busy:
            state = "evaluating"
        if (environment := self._watch.waiting) is not None:
            state = f"waiting: {environment}"
        lag = None
        if (latest := self._latest) is not None and latest.agent_id in updates:
            lag = float(max(0, updates[latest.agent_id] - latest.version))
        return replace(self._attendance, policy_lag_updates=lag, state=state)

    def _evaluate(self, policy: Policy, halt: threading.Event) -> None:
        name, started = f"agent {policy.agent_id} at step {policy.step:,}", self._clock()
        tensors = policy_tensors(unpacked(policy))
        actor = self._loaded(policy, tensors)
        try:
            result = self._evaluators[policy.agent_id].evaluate(StoppablePolicy(actor, halt, name))
        except DivergedError as error:
            log.warning("%s; it is left out", error)
            return
        now = self._clock()
        self._note(policy, result, tensors, seconds=now - started)
        log.info(
            "%s: evaluation %s (%s, %.1f s)",
            name,
            number(result.return_mean),
            several(result.episodes, "episode"),
            now - started,
        )

    def _note(
        self, policy: Policy, result: Evaluation, tensors: Mapping[str, Any], *, seconds: float
    ) -> None:
        journal = self._journals()[policy.agent_id]
        evaluated = Evaluated(
            step=policy.step,
            version=policy.version,
            return_mean=result.return_mean,
            return_std=result.return_std,
            episodes=result.episodes,
            wall_seconds=journal.seconds + self._clock() - self._began,
        )
        journal.note(evaluated, tensors)
        self._metrics.evaluated(policy.agent_id, result.return_mean, seconds=seconds)
        steps = sum(result.lengths)
        self._attendance = Attendance(
            envs=result.episodes,
            env_steps=self._attendance.env_steps + steps,
            env_steps_per_second=steps / seconds if seconds > 0 else 0.0,
            policy_version=policy.version,
        )
        self._latest = policy
        self.count += 1

    def _loaded(self, policy: Policy, tensors: Mapping[str, Any]) -> Acting:
        agent = self._config.for_agent(policy.agent_id).agent
        try:
            return load_policy(agent, self._schema, tensors, pick_device(None))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"policy {policy.version} of agent {policy.agent_id} is not what this evaluator's settings "
                f"say ({error.args[0]}); start it with the settings of the learners"
            ) from None
