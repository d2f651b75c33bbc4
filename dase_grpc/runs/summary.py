"""The summary of a run from its agents' files: how far it came, how long it took, what was left out."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from dase_grpc.config.resolve import RunConfig
from dase_grpc.runs.curves import FINAL, Series, final_score
from dase_grpc.runs.directory import EVALUATOR_MODE, AgentDirectory, RunDirectory, checkpoint_paths
from dase_grpc.runs.logs import Evaluations, read_evaluations, read_metrics

FINAL_FROM: Final = 2 * FINAL
"""Evaluations after the random steps from which on the mean of the last 10 says how an agent ended."""


@dataclass(frozen=True)
class AgentFiles:
    """What one agent has written so far; checkpoint is the step of its latest, None without any."""

    evaluations: Evaluations
    records: Sequence[Mapping[str, Any]]
    checkpoint: int | None

    @classmethod
    def read(cls, agent: AgentDirectory) -> Self:
        """Reads the agent's files, none of which has to exist.

        Raises:
            RunDirectoryError: one of them is damaged.
        """
        return cls(
            read_evaluations(agent.evaluations.path),
            read_metrics(agent.metrics.path),
            max(checkpoint_paths(agent.checkpoints), default=None),
        )

    @property
    def step(self) -> int:
        """The last step that any file tells of."""
        evaluated = int(self.evaluations.step[-1]) if len(self.evaluations) else 0
        recorded = (int(record.get("step") or 0) for record in self.records[-1:])
        return max([evaluated, self.checkpoint or 0, *recorded])

    @property
    def seconds(self) -> float:
        """The largest wall_seconds; 0 without any."""
        recorded = (float(record.get("wall_seconds") or 0) for record in self.records)
        evaluated = map(float, self.evaluations.wall_seconds)
        return max([0.0, *evaluated, *recorded])


def status(run: RunDirectory, agents: Mapping[int, AgentFiles]) -> str:
    """Whether the run has finished, was stopped, or is running or failed: a file cannot tell these two apart.

    The last thing a learner writes is a checkpoint, also when it is stopped; the others it writes at
    multiples of train.checkpoint_every.
    """
    config = run.config
    total = config.train.steps
    missing = run.run.get("mode") not in ("node", EVALUATOR_MODE) and len(agents) < config.train.agents
    has_ended = _is_evaluated if run.run.get("mode") == EVALUATOR_MODE else _ended
    ended = bool(agents) and not missing and all(has_ended(config, files) for files in agents.values())
    step = 0 if missing or not agents else min(files.step for files in agents.values())
    if ended and step >= total:
        return "finished"
    return f"{'stopped' if ended else 'running or failed'} at step {step:,} of {total:,}"


def refused(agents: Iterable[AgentFiles]) -> Counter[str]:
    """How many transitions were not stored, by what was not finite in them."""
    total: Counter[str] = Counter()
    for files in agents:
        for record in files.records:
            total.update(record.get("refused") or {})
    return total


def settled_score(curve: Series, *, start_steps: int) -> float | None:
    """The mean of the last 10 evaluations; None where too few of them follow the random steps."""
    learned = int((curve.step > start_steps).sum())
    return final_score(curve) if learned >= FINAL_FROM else None


def _is_evaluated(config: RunConfig, files: AgentFiles) -> bool:
    """Whether the last policy is evaluated, which is all that is in a folder of an evaluator's own."""
    return files.step >= config.train.steps


def _ended(config: RunConfig, files: AgentFiles) -> bool:
    kept = files.checkpoint
    if kept is None or kept < files.step:
        return False
    return kept == 0 or kept >= config.train.steps or kept % config.train.checkpoint_every != 0
