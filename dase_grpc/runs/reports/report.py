"""The report of a run: one HTML page that needs nothing beside it, from the files of the run directory.

What the page says lies in report.html; here are its numbers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import tomli_w

from dase_grpc.config.algorithms import SIMILARITY, algorithm_name
from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import RunDirectoryError
from dase_grpc.progress import duration, several
from dase_grpc.runs.curves import (
    FINAL,
    FINAL_FROM,
    LARGEST,
    SMOOTHING,
    AgentFiles,
    Series,
    column,
    mean_of,
    recent,
    recent_weights,
    refused,
    returns,
    settled_score,
    status,
)
from dase_grpc.runs.directory import EVALUATOR_MODE, IN_ROUNDS, RunDirectory
from dase_grpc.runs.files import replace_file, utf8
from dase_grpc.runs.logs import Score, read_restarts, read_scores, told
from dase_grpc.runs.reference import PublishedRow, comparable, published_method
from dase_grpc.runs.reports import html, plots

Records = Mapping[int, Sequence[Mapping[str, Any]]]

_METHODS: Final = {
    "jeffreys": "DASE",
    "js": "DASE with the true Jensen-Shannon divergence",
    "kl": "DASE with the KL divergence",
    "none": "experience sharing without correction (λ = 1)",
    "isolated": "isolated agents on one buffer (λ = 0)",
}


@np.errstate(all="ignore")  # an environment may have numpy raise
def write_report(run: RunDirectory) -> Path:
    """Writes the run's report.html, all at once, and returns its path; works at any moment of a run."""
    agents = {agent.agent_id: AgentFiles.read(agent) for agent in run.agents()}
    records = {agent: files.records for agent, files in agents.items()}
    config, capacity = run.config, run.config.replay.capacity
    text = html.page(
        "report.html",
        title=run.name,
        heading=config.env.id,
        subtitle=f"{method(config)} · run {run.name} of {_created(run)[:10]}",
        facts=_facts(run, agents),
        config=config,
        records=records,
        plots=plots,
        several=several,
        refused=refused(agents.values()),
        capacity=capacity if isinstance(capacity, int) else None,
        batch_sizes={each.batch_size for each in config.distinct_agents},
        made=_made(run),
        policies=_policies(read_scores(run.scores)),
        settings=tomli_w.dumps(config.model_dump(mode="json")),
        **_of_curves(config, {agent: returns(files.evaluations) for agent, files in agents.items()}),
        **_of_exchange(records),
        largest=f"{LARGEST:g}",
        beyond=_beyond(agents.values()),
    )
    try:
        replace_file(run.report, utf8(text))
    except OSError as error:
        raise RunDirectoryError(f"cannot write {run.report}: {error.strerror or error}") from None
    return run.report


def method(config: RunConfig) -> str:
    """What was trained, in a few words."""
    algorithm = _algorithms(config)
    if config.method == "dpd":
        return f"{algorithm}, a pair that distils each other's policies (DPD)"
    if config.train.agents == 1:
        return f"{algorithm}, one agent"
    dps = config.dps
    how = _METHODS[dps.divergence] if dps.measure == SIMILARITY else f"weighed by the measure {dps.measure}"
    return f"{algorithm} with K = {several(config.train.agents, 'agent')}, {how}"


def _algorithms(config: RunConfig) -> str:
    return ", ".join(map(algorithm_name, config.algorithms))


def _of_each(config: RunConfig, key: str) -> str:
    """A whole-number setting of the agents; several where a mixed ensemble has several."""
    values = dict.fromkeys(getattr(each, key) for each in config.distinct_agents)
    return ", ".join(f"{value:,}" for value in values)


def _facts(run: RunDirectory, agents: Mapping[int, AgentFiles]) -> dict[str, str]:
    config = run.config
    capacity = config.replay.capacity
    seconds = max((files.seconds for files in agents.values()), default=0.0)
    failed = [f"{node} was {text}" for node, text in told(read_restarts(run.restarts)).items()]
    return {
        "Status": status(run, agents),
        "Duration": duration(seconds) if seconds else "–",
        "Environment": config.env.id,
        "Algorithm": _algorithms(config),
        **_how_they_learn_from_each_other(config),
        "Agents (K)": str(config.train.agents),
        "Steps of each agent": f"{config.train.steps:,}",
        "Random steps": _of_each(config, "start_steps"),
        "Buffer capacity": f"{capacity:,}" if isinstance(capacity, int) else capacity,
        "Batch": _of_each(config, "batch_size"),
        "Seed": str(config.train.seed),
        "Mode": _mode(str(run.run.get("mode", "–"))),
        **({"Restarts": "; ".join(failed)} if failed else {}),
    }


def _how_they_learn_from_each_other(config: RunConfig) -> dict[str, str]:
    if config.method == "dpd":
        dpd = config.dpd
        each = "after each update" if dpd.distil_every == 1 else f"every {dpd.distil_every:,} updates"
        return {"Distillation": f"{dpd.states} states, α = {dpd.alpha:g}, {each}"}
    dps = config.dps
    if dps.measure != SIMILARITY:
        return {"Measure": dps.measure}
    return {"Similarity": f"{dps.divergence}, {dps.scope}, r = {dps.reference_variance:g}"}


def _mode(mode: str) -> str:
    nodes = dict.fromkeys(("cluster", "node", EVALUATOR_MODE), "depends on timing")
    why = {**nodes, **dict.fromkeys(IN_ROUNDS, "reproducible")}.get(mode)
    return f"{mode} ({why})" if why else mode


def _of_curves(config: RunConfig, curves: Mapping[int, Series]) -> dict[str, Any]:
    """What the page shows of the evaluations, and of what was published beside them."""
    evaluated = {agent: curve for agent, curve in curves.items() if len(curve)}
    settled = [settled_score(curve, start_steps=config.start_steps) for curve in evaluated.values()]
    rows = comparable(config)
    shown = ("single", "dase-k2", published_method(config))
    return {
        "curves": curves,
        "scores": _scores(config, evaluated, settled),
        "settled": None not in settled,
        "longest": max(map(len, curves.values()), default=0),
        "drawn": [row for row in rows if row.method in shown],
        "published": _published(rows),
        "origin": rows[0] if rows else None,
        "smoothing": SMOOTHING,
        "final": FINAL,
        "final_from": FINAL_FROM,
    }


def _beyond(agents: Iterable[AgentFiles]) -> Counter[str]:
    """How many numbers of each kind are too large for a picture."""
    found: Counter[str] = Counter()
    for files in agents:
        found["return_mean"] += int((np.abs(files.evaluations.return_mean) > LARGEST).sum())
        for record in files.records:
            found.update(key for key, value in record.items() if _is_beyond(value))
    return +found


def _is_beyond(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) > LARGEST


def _scores(
    config: RunConfig, evaluated: Mapping[int, Series], settled: Sequence[float | None]
) -> html.Table:
    columns = ("", "last", f"final (mean of last {FINAL})", "first", "best", "evaluations")
    finals = [np.nan if final is None else final for final in settled]
    scores = np.array([_score(*each) for each in zip(evaluated.values(), finals, strict=True)])
    names = [config.agent_name(agent) for agent in evaluated]
    counts = [str(len(curve)) for curve in evaluated.values()]
    if len(names) > 1:  # bests of different steps have no mean that says anything
        mean = np.where([True, True, True, False], mean_of(scores), np.nan)
        scores = np.vstack([scores, mean])
        names, counts = [*names, "mean over agents"], [*counts, ""]
    digits = html.digits(scores)
    rows = [
        (name, *(html.number(value, digits) for value in values), count)
        for name, values, count in zip(names, scores.tolist(), counts, strict=True)
    ]
    return html.Table("", columns, rows)


def _policies(scores: Sequence[Score]) -> html.Table:
    """The latest score of each policy that `dase evaluate` makes of all agents."""
    latest = {score.policy: score for score in scores}
    digits = html.digits(np.array([each.return_mean for each in latest.values()]))
    rows = [
        (
            each.policy if each.agent is None else f"{each.policy}: agent {each.agent}",
            f"{html.number(each.return_mean, digits)} ± {html.number(each.return_std, digits)}",
            str(each.episodes),
            f"{each.step:,}",
        )
        for each in latest.values()
    ]
    return html.Table("", ("policy", "return", "episodes", "after steps"), rows)


def _score(curve: Series, final: float) -> tuple[float, ...]:
    values = curve.value
    return values[-1], final, values[0], values[np.isfinite(values)].max(initial=-np.inf)


def _published(rows: Sequence[PublishedRow]) -> html.Table:
    steps = [point.step for point in rows[0].points] if rows else []
    columns = ("as published", *(f"{step // 1000}k" for step in steps), "final, 1M", "curves")
    cells = [
        (
            row.method,
            *(
                f"{html.number(each.mean, 0)} ± {html.number(each.std, 0)}"
                for each in (*row.points, row.final)
            ),
            f"{row.curves} {row.cell_rank}".strip(),
        )
        for row in sorted(rows, key=lambda row: (row.combined, row.agents, row.method))
    ]
    return html.Table("", columns, cells)


def _of_exchange(records: Records) -> dict[str, Any]:
    """What the page shows of what the agents had of each other: transitions, or policies."""
    refused_policies = [record.get("refused_policies") or 0 for each in records.values() for record in each]
    ids, weights = recent_weights(records)
    return {
        "refused_policies": sum(refused_policies),
        "shares": _shares(records),
        "ids": ids,
        "pairs": html.heat_map(weights) if np.isfinite(weights).any() else None,
    }


def _shares(records: Records) -> tuple[float, float] | None:
    """Recent means over agents: external transitions' share of the loss weight, the effective batch."""
    found = [
        (share, batch)
        for rows in records.values()
        if (share := recent(column(rows, "external_share"))) is not None
        and (batch := recent(column(rows, "effective_batch")))
    ]
    return tuple(np.mean(found, axis=0).tolist()) if found else None


def _made(run: RunDirectory) -> dict[str, str]:
    command = str(run.run.get("command") or "")
    return {**({"Command": command} if command else {}), "Created": _created(run), **run.versions}


def _created(run: RunDirectory) -> str:
    return str(run.run.get("created", "–")).replace("T", " ").replace("+00:00", " UTC")
