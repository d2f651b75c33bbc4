"""Results as numbers: curves as arrays, scores, series out of metrics.jsonl, and how far a run came."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from dase_grpc.config.resolve import RunConfig
from dase_grpc.runs.directory import EVALUATOR_MODE, AgentDirectory, RunDirectory, checkpoint_paths
from dase_grpc.runs.logs import Evaluations, Floats, Ints, read_evaluations, read_metrics

SMOOTHING: Final = 25
LARGEST: Final = 1e100
"""Numbers whose squares and sums are numbers still; those beyond are neither drawn nor compared."""
FINAL: Final = 10
FINAL_FROM: Final = 2 * FINAL
"""Evaluations after the random steps from which on the mean of the last 10 says how an agent ended."""
AROUND: Final = 5
"""Evaluations before and after a step that belong to what is published for the step."""


@dataclass(frozen=True)
class Series:
    """Numbers over environment steps: step is (N,), value (N,) or, of several agents, (K, N)."""

    step: Ints
    value: Floats

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class AgentFiles:
    """What one agent has written so far; checkpoint is the step of its latest, None without any."""

    evaluations: Evaluations
    records: Sequence[Mapping[str, Any]]
    checkpoint: int | None

    @classmethod
    def read(cls, agent: AgentDirectory) -> Self:
        """Reads the agent's files, none of which has to exist."""
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


def smoothed(values: Floats, window: int = SMOOTHING) -> Floats:
    """The centred moving average over `window` (odd) values along the last axis, of the same length.

    Near both ends, only the part of the window that exists is averaged. Values that are not finite
    are left out; NaN where a window holds none.
    """
    half, length = window // 2, values.shape[-1]
    index = np.arange(length)
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, length)
    finite = np.isfinite(values)
    sums = _running_sum(np.where(finite, values, 0.0))
    counts = _running_sum(finite.astype(np.float64))
    count = counts[..., last] - counts[..., first]
    result: Floats = np.where(count > 0, (sums[..., last] - sums[..., first]) / np.maximum(count, 1), np.nan)
    return result


def returns(evaluations: Evaluations) -> Series:
    """The mean return over steps, ascending; of a step that was evaluated again, the last counts."""
    backwards = evaluations.step[::-1]
    step, index = np.unique(backwards, return_index=True)
    return Series(step, evaluations.return_mean[::-1][index])


def shared_curves(agents: Sequence[Series]) -> Series:
    """The agents that have any evaluation, at the steps where all of those have one: (K, N)."""
    present = [agent for agent in agents if len(agent)]
    if not present:
        return Series(np.empty(0, np.int64), np.empty((0, 0)))
    step = present[0].step
    for agent in present[1:]:
        step = np.intersect1d(step, agent.step)
    return Series(step, np.stack([agent.value[np.isin(agent.step, step)] for agent in present]))


def mean_of(values: Floats) -> Floats:
    """The mean over the first axis, also where the sum is beyond all numbers."""
    with np.errstate(all="ignore"):
        plain: Floats = values.mean(axis=0)
        return np.where(np.isfinite(plain), plain, (values / len(values)).sum(axis=0))


def drawable(series: Series) -> Series:
    """The series with NaN in place of numbers beyond LARGEST, which no axis can hold."""
    return Series(series.step, np.where(np.abs(series.value) > LARGEST, np.nan, series.value))


def spread(values: Floats) -> Floats:
    """The standard deviation (n−1) over the first axis; zeros where that has one entry."""
    if len(values) < 2:
        return np.zeros(values.shape[1:])
    with np.errstate(all="ignore"):  # a diverged agent's returns
        result: Floats = values.std(axis=0, ddof=1)
    return result


def final_score(curve: Series) -> float:
    """The mean of the last 10 evaluations, or of all when there are fewer; there is at least one."""
    return float(mean_of(curve.value[-FINAL:]))


def area(curve: Series) -> float:
    """The area under the curve by the trapezoidal rule, divided by the steps that it spans: a mean return.

    Of a curve with one evaluation it is that; there is at least one.
    """
    if len(curve) == 1:
        return float(curve.value[0])
    return float(np.trapezoid(curve.value, curve.step) / (curve.step[-1] - curve.step[0]))


def around(curve: Series, step: int, *, every: int = 1_000) -> float:
    """The mean of the 11 evaluations around a step, or of those among them that there are.

    NaN where there is none, or where the curve does not reach to both ends of the window: while returns
    rise, the first half of a window alone would be lower than what it is compared with.
    every is the number of steps between two evaluations; the published curves have one each 1000.
    """
    first, last = step - AROUND * every, step + AROUND * every
    near = curve.value[(curve.step >= first) & (curve.step <= last)]
    if not len(near) or curve.step[0] > first or curve.step[-1] < last:
        return float("nan")
    return float(near.mean())


def column(records: Iterable[Mapping[str, Any]], key: str) -> Series:
    """One number of metrics.jsonl over steps; records without it are left out."""
    return _series((record.get("step"), record.get(key)) for record in records)


def peers_of(agent: int, records: Sequence[Mapping[str, Any]], key: str = "similarity") -> dict[int, Series]:
    """A number of each other agent's transitions, as `agent` saw them, over steps, by that agent's id.

    The number is that under `key`, the mean λ as a rule.
    """
    tables = [(record.get("step"), record.get(key) or {}) for record in records]
    sources = sorted({int(source) for _, table in tables for source in table} - {agent})
    series = {source: _series((step, table.get(str(source))) for step, table in tables) for source in sources}
    return {source: values for source, values in series.items() if len(values)}


def recent(series: Series) -> float | None:
    """The mean over the last quarter of the records; None without any."""
    return float(mean_of(series.value[-max(1, len(series) // 4) :])) if len(series) else None


def recent_weights(agents: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[list[int], Floats]:
    """All ids, and the mean λ of every pair over the last quarter of its records.

    (K, K), learners down, collecting agents across; NaN where nothing was measured.
    """
    tables = {agent: peers_of(agent, records) for agent, records in agents.items()}
    ids = sorted({*tables, *(source for peers in tables.values() for source in peers)})
    index = {agent: position for position, agent in enumerate(ids)}
    weights = np.full((len(ids), len(ids)), np.nan)
    for agent, peers in tables.items():
        for source, series in peers.items():
            weights[index[agent], index[source]] = recent(series)
    return ids, weights


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


def _running_sum(values: Floats) -> Floats:
    zero = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([zero, values.cumsum(axis=-1)], axis=-1)


def _series(pairs: Iterable[tuple[Any, Any]]) -> Series:
    kept = [(step, value) for step, value in pairs if step is not None and value is not None]
    table = np.array(kept, np.float64).reshape(-1, 2)
    return Series(table[:, 0].astype(np.int64), table[:, 1])


def _is_evaluated(config: RunConfig, files: AgentFiles) -> bool:
    """Whether the last policy is evaluated, which is all that is in a folder of an evaluator's own."""
    return files.step >= config.train.steps


def _ended(config: RunConfig, files: AgentFiles) -> bool:
    kept = files.checkpoint
    if kept is None or kept < files.step:
        return False
    return kept == 0 or kept >= config.train.steps or kept % config.train.checkpoint_every != 0
