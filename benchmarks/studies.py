"""Keeps what the runs of an experiment came to, and prints a study's tables from what is kept.

python benchmarks/studies.py keep runs/own-share docs/results/own-share
python benchmarks/studies.py restore docs/results/own-share runs/own-share
python benchmarks/studies.py tables docs/results/own-share --reference single --at 8000

`keep` copies, of each finished run that is not kept yet, its evaluations, and run.toml and finished.json
without the folders of this machine; and evaluates its last policies in episodes that training has not seen:
each agent, the best of them, which is chosen by other episodes, and the ensemble (policies.csv). `restore`
puts what is kept where `dase experiment` looks for it, which then runs none of these cells again.

`tables` prints Markdown for each environment. A row is named by its method and K, by its measure or
divergence where these vary in the study, and by what else varies and is no default: so its name is the same
in every environment, whatever else has finished. The final score is the mean of the last 3 evaluations up to
the step, over a run's agents; the area that under the mean curve, over its steps. Estimates are interquartile
means over runs with 95 % bootstrap intervals, as `dase compare` has them; differences are by seed.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from measuring import markdown
from results_files import read_lines, write_lines

from dase_grpc.config.resolve import resolve
from dase_grpc.errors import DaseError
from dase_grpc.launch.evaluate import EvaluatedCheckpoint, evaluate_checkpoint
from dase_grpc.launch.experiments.folder import FINISHED_FILE
from dase_grpc.runs.curves import Series, area
from dase_grpc.runs.directory import RUN_FILE, RunDirectory, checkpoint_path
from dase_grpc.runs.reports.estimates import Estimate, estimate, improvement
from dase_grpc.runs.reports.sources import (
    Group,
    LeftOut,
    SourceRun,
    differing,
    find_runs,
    grouped,
    read_runs,
    settings,
)
from dase_grpc.seeding import Purpose, integer

LAST: Final = 3
EPISODES: Final = 10
POLICIES_FILE: Final = "policies.csv"
COMMAND_LINE: Final = rb"^command = .*$"
MEAN, BEST, ENSEMBLE = "mean of agents", "best", "ensemble"
_MEASURE, _DIVERGENCE = "dps.measure", "dps.divergence"
_NAMED_BY_METHOD: Final = frozenset({"train.method", "train.agents", _MEASURE, _DIVERGENCE})


@dataclass(frozen=True)
class PolicyScore:
    """The mean return of one policy: an agent's by its id, "best" or "ensemble"."""

    policy: str
    return_mean: float
    return_std: float
    episodes: int


# -- keeping ------------------------------------------------------------------------------------------


def keep(experiment: Path, kept: Path) -> list[Path]:
    """Keeps what finished runs came to; the new folders."""
    done = sorted(path.parent for path in experiment.glob(f"*/{FINISHED_FILE}"))
    return [_keep(run, kept / run.name) for run in done if not (kept / run.name / POLICIES_FILE).exists()]


def _keep(run: Path, place: Path) -> Path:
    scores = policy_scores(run)
    for file in run.glob("agents/*/evaluations.csv"):
        copy = place / file.relative_to(run)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    told = re.sub(COMMAND_LINE, _without_folders, (run / RUN_FILE).read_bytes(), flags=re.MULTILINE)
    finished = json.loads((run / FINISHED_FILE).read_bytes())
    finished["run_sha256"] = hashlib.sha256(told).hexdigest()
    (place / RUN_FILE).write_bytes(told)
    (place / FINISHED_FILE).write_text(f"{json.dumps(finished)}\n", encoding="utf-8")
    write_lines(place / POLICIES_FILE, list(PolicyScore.__annotations__), map(vars, scores))
    return place


def _without_folders(command: re.Match[bytes]) -> bytes:
    return re.sub(rb"(?<=[\s=\"])/[^\s\"]*/", b"", command[0])


def restore(kept: Path, experiment: Path) -> list[Path]:
    """Puts kept runs in the place of an experiment's, as finished ones without their policies."""
    found = sorted(path.parent for path in kept.glob(f"*/{FINISHED_FILE}"))
    return [_restore(run, experiment / run.name) for run in found if not (experiment / run.name).exists()]


def _restore(run: Path, place: Path) -> Path:
    shutil.copytree(run, place)
    directory = RunDirectory.open(place)
    for agent in directory.agents():
        checkpoint_path(agent.checkpoints, directory.config.train.steps).mkdir(parents=True)
    return place


def policy_scores(run: Path) -> list[PolicyScore]:
    """The policies of a run in the same fresh episodes: each agent's, and of several both of all."""
    config = RunDirectory.open(run).config
    seed = integer(config.train.seed, Purpose.SCORE)
    found = {str(each.agent_id): each for each in evaluate_checkpoint(run, EPISODES, seed=seed)}
    if len(found) > 1:
        (found[BEST],) = evaluate_checkpoint(run, EPISODES, agent="best")
        (found[ENSEMBLE],) = evaluate_checkpoint(run, EPISODES, agent="ensemble")
    return [_score(policy, each) for policy, each in found.items()]


def _score(policy: str, found: EvaluatedCheckpoint) -> PolicyScore:
    result = found.evaluation
    return PolicyScore(policy, result.return_mean, result.return_std, result.episodes)


# -- tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One way to train, up to a step: what its runs came to, by seed."""

    label: str
    step: int
    final: Mapping[int, float]
    area: Mapping[int, float]
    policies: Mapping[str, Sequence[float]]


def row_of(group: Group, label: str, step: int) -> Row:
    """The row of a group whose runs all reach the step."""
    return Row(
        label,
        step,
        {run.seed: _final(_until(run.curve, step)) for run in group.runs},
        {run.seed: area(_until(run.curve, step)) for run in group.runs},
        _policies(group.runs) if step == group.runs[0].config.train.steps else {},
    )


@dataclass(frozen=True)
class NamedGroup:
    """The runs of one way to train in one environment, and its name."""

    name: str
    group: Group


@dataclass(frozen=True)
class Kept:
    """What is kept of a study, by environment, and the runs that no statistics can be computed of."""

    groups: Mapping[str, Sequence[NamedGroup]]
    left_out: Sequence[LeftOut]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """All runs in a folder."""
        runs, left_out = read_runs(find_runs([folder]))
        groups = grouped(runs)
        found: dict[str, list[NamedGroup]] = {}
        for name, group in zip(names_of(groups), groups, strict=True):
            found.setdefault(group.environment, []).append(NamedGroup(name, group))
        return cls(found, left_out)

    @property
    def all_groups(self) -> list[NamedGroup]:
        """Those of all environments."""
        return [each for groups in self.groups.values() for each in groups]

    @property
    def runs(self) -> list[SourceRun]:
        """All that are of use."""
        return [run for each in self.all_groups for run in each.group.runs]

    def rows(self, environment: str, at: Sequence[int]) -> list[Row]:
        """A row for each group of an environment and each step that all its runs reach."""
        return [
            row_of(each.group, each.name, step)
            for each in self.groups[environment]
            for step in at
            if all(run.curve.step[-1] >= step for run in each.group.runs)
        ]


def names_of(groups: Sequence[Group]) -> list[str]:
    """A name for each group, the same for the same settings in every environment."""
    told, usual = differing(groups), settings(resolve({"train": {"agents": 2}}))
    several = len({group.algorithms for group in groups}) > 1
    return [
        ", ".join([group.algorithm_names] * several + [group.method_name, *_particulars(group, told, usual)])
        for group in groups
    ]


def _particulars(group: Group, told: Sequence[str], usual: Mapping[str, Any]) -> Iterator[str]:
    """Its measure or divergence, if any group has another one, and what else is told and is not as usual."""
    if _MEASURE in group.settings and (_MEASURE in told or _DIVERGENCE in told):
        measure = group.settings[_MEASURE]
        yield group.settings[_DIVERGENCE] if measure == usual[_MEASURE] else measure
    for key in told:
        value = group.settings.get(key)
        if key not in _NAMED_BY_METHOD and value is not None and value != usual.get(key):
            short = key.rpartition(".")[2]
            yield short if value is True else f"{short}={value}"


def _until(curve: Series, step: int) -> Series:
    reached = curve.step <= step
    return Series(curve.step[reached], curve.value[reached])


def _final(curve: Series) -> float:
    return float(curve.value[-LAST:].mean())


def _policies(runs: Iterable[SourceRun]) -> dict[str, list[float]]:
    """The returns of each kind of policy, one for each run that has it."""
    found: dict[str, list[float]] = {}
    for run in runs:
        scores = {each.policy: each.return_mean for each in read_lines(run.path / POLICIES_FILE, PolicyScore)}
        agents = [scores[name] for name in scores if name not in (BEST, ENSEMBLE)]
        for name, value in {MEAN: float(np.mean(agents)), **scores}.items():
            if name in (MEAN, BEST, ENSEMBLE):
                found.setdefault(name, []).append(value)
    return found


def score_table(rows: Sequence[Row], references: Sequence[Row]) -> str:
    """Final score and area of each row, and the differences to each reference by seed."""
    heads = ["trained", "steps", "runs", "final", "area"]
    for reference in references:
        heads += [f"final − {reference.label}", f"area − {reference.label}", f"P(> {reference.label})"]
    body = []
    for row in sorted(rows, key=lambda row: -estimate([*row.final.values()]).iqm):
        cells = [row.label, f"{row.step:,}", str(len(row.final))]
        cells += [shown([*values.values()]) for values in (row.final, row.area)]
        for reference in references:
            cells += _against(row, reference)
        body.append(cells)
    return markdown(heads, body)


def _against(row: Row, reference: Row) -> list[str]:
    if row is reference:
        return ["–", "–", "–"]
    chance = improvement([*row.final.values()], [*reference.final.values()])
    return [
        shown(differences(row.final, reference.final)),
        shown(differences(row.area, reference.area)),
        f"{chance.probability:.2f}",
    ]


def differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """By seed, over the seeds that both have."""
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def policy_table(rows: Sequence[Row]) -> str:
    """What one policy out of several agents is worth, over the runs of each row that have it."""
    kinds = (MEAN, BEST, ENSEMBLE)
    body = [
        [
            row.label,
            f"{row.step:,}",
            str(len(row.policies[MEAN])),
            *(shown(row.policies[kind]) for kind in kinds),
        ]
        for row in rows
        if ENSEMBLE in row.policies
    ]
    return markdown(["trained", "steps", "runs", *kinds], body) if body else ""


def shown(values: Sequence[float]) -> str:
    """The interquartile mean and its interval; a dash of no values."""
    if not values:
        return "–"
    found: Estimate = estimate(values)
    text = f"{found.iqm:,.0f}"
    if found.interval is not None:
        text += f" [{found.interval.low:,.0f}, {found.interval.high:,.0f}]"
    return text.replace("-", "−")


def tables(kept: Path, references: Sequence[str], at: Sequence[int]) -> str:
    """The tables of every environment, as Markdown.

    Raises:
        DaseError: a reference names no row of an environment.
    """
    parts, found = [], Kept.read(kept)
    for environment in found.groups:
        rows = found.rows(environment, at)
        chosen = [named(rows, name, environment) for name in references]
        parts += [f"### {environment}", score_table(rows, chosen), policy_table(rows)]
    parts += map(str, found.left_out)
    return "\n\n".join(filter(None, parts)) + "\n"


def named(rows: Sequence[Row], name: str, environment: str) -> Row:
    """The first row of this label, or DaseError that says which there are."""
    for row in rows:
        if row.label == name:
            return row
    known = ", ".join(dict.fromkeys(row.label for row in rows))
    raise DaseError(f"{environment} has no {name!r}; there are {known}")


def _copied(work: Callable[..., list[Path]], places: Sequence[str], options: argparse.Namespace) -> str:
    return "".join(f"{path}\n" for path in work(*(getattr(options, place) for place in places)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, places, work in (
        ("keep", ("experiment", "kept"), keep),
        ("restore", ("kept", "experiment"), restore),
    ):
        copying = commands.add_parser(name)
        for place in places:
            copying.add_argument(place, type=Path)
        copying.set_defaults(run=partial(_copied, work, places))
    printing = commands.add_parser("tables")
    printing.add_argument("kept", type=Path)
    printing.add_argument("--reference", action="append", default=[], metavar="LABEL")
    printing.add_argument("--at", type=int, nargs="+", required=True, metavar="STEP")
    printing.set_defaults(run=lambda o: tables(o.kept, o.reference, o.at))
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], str] = options.run
    try:
        sys.stdout.write(run(options))
    except DaseError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
