"""The report of a run: one HTML page that needs nothing beside it, from the files of the run directory."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import tomli_w
from markupsafe import Markup

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import RunDirectoryError
from dase_grpc.progress import duration, several
from dase_grpc.runs.curves import FINAL, SMOOTHING, Series, column, recent, recent_weights, returns
from dase_grpc.runs.directory import EVALUATOR_MODE, IN_ROUNDS, RunDirectory
from dase_grpc.runs.files import replace_file, utf8
from dase_grpc.runs.logs import read_restarts, told
from dase_grpc.runs.reference import PublishedRow, comparable, published_method
from dase_grpc.runs.reports import html, plots
from dase_grpc.runs.summary import FINAL_FROM, AgentFiles, refused, settled_score, status

Records = Mapping[int, Sequence[Mapping[str, Any]]]

_METHODS: Final = {
    "jeffreys": "DASE",
    "js": "DASE with the true Jensen-Shannon divergence",
    "kl": "DASE with the KL divergence",
    "none": "experience sharing without correction (λ = 1)",
    "isolated": "isolated agents on one buffer (λ = 0)",
}
_USED: Final = {
    "pooled": "one λ for all external transitions of a batch",
    "agent": "the mean of the external transitions' λ, one for each collecting agent",
    "transition": "the mean of the external transitions' λ, each its own",
}
_BY_SOURCE: Final = {
    "pooled": "a diagnostic that weighs nothing; what weighs is the λ of all external transitions together",
    "agent": "which is what weighs",
    "transition": "their mean",
}


@np.errstate(all="ignore")  # an environment may have numpy raise
def write_report(run: RunDirectory) -> Path:
    """Writes the run's report.html, all at once, and returns its path; works at any moment of a run.

    Raises:
        RunDirectoryError: a file of the run is damaged, or the report cannot be written.
    """
    agents = {agent.agent_id: AgentFiles.read(agent) for agent in run.agents()}
    curves = {agent: returns(files.evaluations) for agent, files in agents.items()}
    records = {agent: files.records for agent, files in agents.items()}
    config = run.config
    text = html.page(
        "report.html",
        title=run.name,
        heading=config.env.id,
        subtitle=f"{method(config)} · run {run.name} of {_created(run)[:10]}",
        facts=_facts(run, agents),
        sections={
            "Scores": _scores(config, curves),
            "Learning curves": _learning(config, curves),
            **_exchange(config, records),
            "Training": [*_refused(agents), *_training(config, records)],
            "How this run was made": _origin(run),
        },
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
    return f"{algorithm} with K = {several(config.train.agents, 'agent')}, {_METHODS[config.dps.divergence]}"


def _algorithms(config: RunConfig) -> str:
    return ", ".join(name.upper() for name in config.algorithms)


def _of_each(config: RunConfig, key: str) -> str:
    """A whole-number setting of the agents; several where a mixed ensemble has several."""
    values = dict.fromkeys(getattr(each, key) for each in config.distinct_agents)
    return ", ".join(f"{value:,}" for value in values)


def _facts(run: RunDirectory, agents: Mapping[int, AgentFiles]) -> dict[str, str]:
    config = run.config
    capacity = config.replay.capacity
    seconds = max((files.seconds for files in agents.values()), default=0.0)
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
        **_restarts(run),
    }


def _restarts(run: RunDirectory) -> dict[str, str]:
    failed = told(read_restarts(run.restarts))
    return {"Restarts": "; ".join(f"{node} was {text}" for node, text in failed.items())} if failed else {}


def _how_they_learn_from_each_other(config: RunConfig) -> dict[str, str]:
    if config.method == "dpd":
        dpd = config.dpd
        each = "after each update" if dpd.distil_every == 1 else f"every {dpd.distil_every:,} updates"
        return {"Distillation": f"{dpd.states} states, α = {dpd.alpha:g}, {each}"}
    dps = config.dps
    return {"Similarity": f"{dps.divergence}, {dps.scope}, r = {dps.reference_variance:g}"}


def _mode(mode: str) -> str:
    nodes = dict.fromkeys(("cluster", "node", EVALUATOR_MODE), "depends on timing")
    why = {**nodes, **dict.fromkeys(IN_ROUNDS, "reproducible")}.get(mode)
    return f"{mode} ({why})" if why else mode


def _scores(config: RunConfig, curves: Mapping[int, Series]) -> list[Markup]:
    evaluated = {agent: curve for agent, curve in curves.items() if len(curve)}
    if not evaluated:
        return [html.empty("No evaluation has been recorded yet.")]
    scores = np.array([_score(config, curve) for curve in evaluated.values()])
    counts = [str(len(curve)) for curve in evaluated.values()]
    names = [config.agent_name(agent) for agent in evaluated]
    if len(names) > 1:  # bests of different steps have no mean that says anything
        mean = np.where([True, True, True, False], scores.mean(axis=0), np.nan)
        scores = np.vstack([scores, mean])
        names, counts = [*names, "mean over agents"], [*counts, ""]
    digits = html.digits(scores)
    rows = [
        [name, *(html.number(value, digits) for value in values), count]
        for name, values, count in zip(names, scores.tolist(), counts, strict=True)
    ]
    columns = ("", "last", f"final (mean of last {FINAL})", "first", "best", "evaluations")
    table = html.table(columns, rows, total=len(evaluated) > 1)
    return [table, *_final_note(config, evaluated.values())]


def _score(config: RunConfig, curve: Series) -> tuple[float, ...]:
    values = curve.value
    final = settled_score(curve, start_steps=config.start_steps)
    best = values[np.isfinite(values)].max(initial=-np.inf)
    return values[-1], np.nan if final is None else final, values[0], best


def _final_note(config: RunConfig, curves: Iterable[Series]) -> list[Markup]:
    start = config.start_steps
    if all(settled_score(curve, start_steps=start) is not None for curve in curves):
        return []
    return [
        html.note(
            f"The final score is shown once {FINAL_FROM} evaluations follow the {start:,} random steps "
            f"(agent.start_steps); of fewer, the last {FINAL} reach back to an agent that had hardly learned."
        )
    ]


def _refused(agents: Mapping[int, AgentFiles]) -> list[Markup]:
    counts = refused(agents.values())
    if not counts:
        return []
    by_reason = ", ".join(f"{count:,} for the {reason}" for reason, count in sorted(counts.items()))
    return [
        html.note(
            f"{several(counts.total(), 'transition was', 'transitions were')} refused and not stored, "
            f"because the environment returned "
            f"numbers that are not finite: {by_reason}."
        )
    ]


def _learning(config: RunConfig, curves: Mapping[int, Series]) -> list[Markup]:
    rows = comparable(config)
    drawn = [row for row in rows if row.method in ("single", "dase-k2", published_method(config))]
    picture = html.figure(
        plots.learning_curves(curves, drawn, name=config.agent_name),
        _learning_caption(config, curves),
        otherwise=(
            "There is no learning curve: no evaluation returned a finite number."
            if any(map(len, curves.values()))
            else "There is no learning curve yet: no evaluation has been recorded."
        ),
    )
    return [picture, *_published_table(rows)]


def _learning_caption(config: RunConfig, curves: Mapping[int, Series]) -> str:
    longest = max((len(curve) for curve in curves.values()), default=0)
    episodes = config.eval.episodes
    mean = "return of 1 episode" if episodes == 1 else f"mean return of {episodes} episodes"
    raw = f"Each evaluation is the {mean} without noise or updates."
    if longest >= 2 * SMOOTHING:
        smooth = (
            f"Faint: every evaluation; strong: the paper's smoothing, a centred moving average over "
            f"{SMOOTHING} evaluations, which near both ends averages only the part of the window that exists."
        )
    else:
        smooth = (
            f"Not smoothed: the paper's moving average over {SMOOTHING} evaluations needs at least "
            f"{2 * SMOOTHING} of them to show anything."
        )
    band = " The band is half a standard deviation over the agents." if len(curves) > 1 else ""
    return f"{raw} {smooth}{band}"


def _published_table(rows: Sequence[PublishedRow]) -> list[Markup]:
    if not rows:
        return []
    steps = [point.step for point in rows[0].points]
    columns = ("as published", *(f"{step // 1000}k" for step in steps), "final, 1M", "curves")
    cells = [
        [
            row.method,
            *(html.spread(point.mean, point.std) for point in row.points),
            html.spread(row.final_mean, row.final_std),
            f"{row.curves} {row.cell_rank}".strip(),
        ]
        for row in sorted(rows, key=lambda row: (row.combined, row.agents, row.method))
    ]
    return [html.note(_published_note(rows[0])), html.table(columns, cells)]


def _published_note(row: PublishedRow) -> str:
    return (
        f"Published for {row.algorithm} in {row.environment} with a buffer of {row.buffer:,}: mean ± "
        f"standard deviation over {row.seeds} seeds of the 11 evaluations around a step (Saglam et al. "
        f"2022, arXiv 2207.13453; from the authors' released curves, MIT license). Their environments are "
        f"Gym v2 with MuJoCo 1.50 and Box2D 2.3.10: a comparison, not a target. Of curves marked “own”, the "
        f"fraction says how many of the 30 in this cell are independent; those marked “combination”, hollow "
        f"in the picture, are exact linear combinations of the others and no evidence of their own."
    )


def _exchange(config: RunConfig, records: Records) -> dict[str, list[Markup]]:
    """What the agents had of each other: transitions, or policies."""
    if config.method == "dpd":
        return {"Distillation": _distillation(config, records)}
    return {"Similarity": _similarity(config, records)}


def _distillation(config: RunConfig, records: Records) -> list[Markup]:
    picture = html.figure(
        plots.distillation(records, name=config.agent_name),
        "Left: the share of a batch's states on which an agent moved towards its peer's action: those where "
        "the peer's value was higher, or all, as dpd.states says. Right: how much each of these states "
        "weighed, exp(α (V_peer − V_own)) within its bounds. Means over the distillations between two "
        "records; each batch holds the agent's own transitions only.",
        otherwise="No distillation has been recorded yet.",
    )
    return [picture, *_refused_policies(records)]


def _refused_policies(records: Records) -> list[Markup]:
    count = sum(record.get("refused_policies") or 0 for each in records.values() for record in each)
    if not count:
        return []
    return [
        html.note(
            f"{several(count, 'policy', 'policies')} of peers held numbers that are not finite and "
            f"{'was' if count == 1 else 'were'} not used."
        )
    ]


def _similarity(config: RunConfig, records: Records) -> list[Markup]:
    if config.train.agents == 1:
        return [html.empty("One agent has no peers, so there is nothing to compare.")]
    lines = html.figure(
        plots.similarity_over_time(records),
        f"Dashed: the weight used, {_USED[config.dps.scope]}, mean over the updates between two records; 1 "
        f"counts like the learner's own, 0 not at all. In colour: λ of each collecting agent's transitions "
        f"by themselves, {_BY_SOURCE[config.dps.scope]}. On a logarithmic scale; values under 10⁻⁹, 0 "
        f"included, are drawn there.",
        otherwise="No similarity weight has been recorded yet.",
    )
    terms = html.figure(
        plots.divergence_terms(records),
        "The two summands of ρ, in nats; λ = exp(−ρ). The covariance term is large when a collector's "
        "actions vary by much more or much less than the reference variance, the mean term when they are "
        "shifted.",
        otherwise="No term of the divergence has been recorded yet.",
    )
    return [
        *_shares(config, records),
        lines,
        *_weights_by_pair(config, records),
        terms,
        *_terms_by_source(records),
    ]


def _shares(config: RunConfig, records: Records) -> list[Markup]:
    """How much of what an agent learns from is other agents' transitions."""
    picture = html.figure(
        plots.sharing(records, {each.batch_size for each in config.distinct_agents}, name=config.agent_name),
        "Left: the share of the loss weight that external transitions have, Σ w of the external rows over "
        "Σ w of the batch. Right: the effective batch size Σ w / max w, how many rows of full weight the "
        "batch is worth. Means over the updates between two records that were looked at. The share of the "
        "gradient is not measured: it depends on the rows' errors too, in each network in another way.",
        otherwise="No share of external transitions has been recorded yet.",
    )
    shares = [recent(column(rows, "external_share")) for rows in records.values()]
    batches = [recent(column(rows, "effective_batch")) for rows in records.values()]
    said = [
        (share, batch) for share, batch in zip(shares, batches, strict=True) if share is not None and batch
    ]
    if not said:
        return [picture]
    share, batch = np.mean(said, axis=0)
    sentence = (
        f"Over the last quarter of the run, mean over agents: external transitions have "
        f"{100 * share:.2g} % of the loss weight, and a batch of {config.agent.batch_size} counts as "
        f"{batch:.4g} transitions."
    )
    return [html.note(sentence), picture]


def _terms_by_source(records: Records) -> list[Markup]:
    if len(records) < 3:  # the one source is the pool
        return []
    return [
        html.figure(
            plots.source_terms(records),
            "The two summands for each collecting agent's transitions by themselves: solid the covariance "
            "term, dotted the mean term.",
            otherwise="No term of a single agent has been recorded yet.",
        )
    ]


def _weights_by_pair(config: RunConfig, records: Records) -> list[Markup]:
    ids, weights = recent_weights(records)
    if not np.isfinite(weights).any():
        return []
    cut = f" The first {html.SHOWN_CELLS} agents are shown." if len(ids) > html.SHOWN_CELLS else ""
    return [
        html.note(
            f"Mean λ of each pair by itself over the last quarter of the run: "
            f"{_BY_SOURCE[config.dps.scope]}.{cut}"
        ),
        html.heat_map(ids, weights),
    ]


def _training(config: RunConfig, records: Records) -> list[Markup]:
    capacity = config.replay.capacity
    return [
        html.figure(
            plots.losses(records, name=config.agent_name),
            "Means over the updates between two records.",
            otherwise="No update has been recorded yet.",
        ),
        html.figure(
            plots.throughput(records, name=config.agent_name),
            "Of each agent by itself; all share the machine they run on.",
            otherwise="No throughput has been recorded yet.",
        ),
        html.figure(
            plots.buffer_fill(records, capacity if isinstance(capacity, int) else None),
            "Transitions of all agents in the shared buffer.",
            otherwise="The buffer's size has not been recorded yet.",
        ),
    ]


def _origin(run: RunDirectory) -> list[Markup]:
    command = str(run.run.get("command") or "")
    facts = {**({"Command": command} if command else {}), "Created": _created(run)}
    settings = tomli_w.dumps(run.config.model_dump(mode="json"))
    return [
        html.facts({**facts, **run.versions}),
        html.folded("Full configuration", settings),
    ]


def _created(run: RunDirectory) -> str:
    return str(run.run.get("created", "–")).replace("T", " ").replace("+00:00", " UTC")
