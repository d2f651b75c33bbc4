"""Fills a study's page from what is kept of its runs: what was run, scores, verdicts of a rule, curves.

python benchmarks/study_page.py docs/results/sharing --at 60000 120000 300000 \
  --rival single --rival "DASE K=2, isolated"

The page is FOLDER.md, beside the folder. What lies in it between `<!-- runs -->` and its end is
replaced, and so are scores, rule, policies and curves. Pictures go into images, beside the results' folder.

The rule is asked at the first of the steps. A row is above if its final score and its area lie above those of
every rival, each with an interval of the difference above 0; below if any of these intervals lies below 0.
There is a verdict from --seeds seeds on: of two that agree even chance makes an interval beside 0.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from measuring import markdown
from page import put
from studies import (
    BEST,
    ENSEMBLE,
    MEAN,
    Kept,
    Row,
    differences,
    named,
    policy_table,
    score_table,
    shown,
)

from dase_grpc.config.texts import json_value
from dase_grpc.errors import DaseError
from dase_grpc.launch.experiments.folder import FINISHED_FILE
from dase_grpc.runs.reports.compare import Comparison, compare
from dase_grpc.runs.reports.comparison_plot import comparison_sheet
from dase_grpc.runs.reports.estimates import estimate
from dase_grpc.runs.reports.figures import PRINT

ABOVE, BELOW, OPEN = "above", "below", "–"


@dataclass(frozen=True)
class Study:
    """What is kept of a study, and how it is looked at."""

    kept: Kept
    at: Sequence[int]
    rivals: Sequence[str]
    seeds: int


def sections(study: Study, pictures: Sequence[Path]) -> dict[str, str]:
    """The page's sections; the pictures lie in a folder beside that of the page."""
    rows = {environment: study.kept.rows(environment, study.at) for environment in study.kept.groups}
    rivals = {env: [named(found, name, env) for name in study.rivals] for env, found in rows.items()}
    scores = [f"### {env}\n\n{score_table(found, rivals[env])}" for env, found in rows.items()]
    policies = [f"### {env}\n\n{table}" for env, found in rows.items() if (table := policy_table(found))]
    return {
        "runs": provenance(study.kept),
        "scores": "\n\n".join(scores),
        "rule": rule_table(rows, rivals, study.at[0], seeds=study.seeds),
        "policies": "\n\n".join([gain_table(rows), *policies]),
        "curves": "\n\n".join(f"![Learning curves](../{each.parent.name}/{each.name})" for each in pictures),
    }


def provenance(kept: Kept) -> str:
    """How many runs of which seeds, by which commits, how long they took, and which are left out, and why."""
    runs = kept.runs
    seconds = [json_value((run.path / FINISHED_FILE).read_text(encoding="utf-8"))["seconds"] for run in runs]
    seeds = sorted({run.seed for run in runs})
    steps = sum(run.agents * run.config.train.steps for run in runs)
    commits = sorted({run.versions.get("git", "unknown")[:10] for run in runs})
    return (
        f"{len(runs)} runs; seeds {', '.join(map(str, seeds))}; {steps:,} environment steps; "
        f"{sum(seconds) / 3600:.1f} hours of run time, pauses and waits for a core included; "
        f"{'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}."
        + "".join(f"\n\n{each}" for each in kept.left_out)
    )


# -- the rule -----------------------------------------------------------------------------------------


def rule_table(
    rows: Mapping[str, Sequence[Row]], rivals: Mapping[str, Sequence[Row]], step: int, *, seeds: int
) -> str:
    """The verdict on every row at a step that is no rival, in each environment, and their number of seeds."""
    found: dict[str, dict[str, str]] = {}
    for environment, all_rows in rows.items():
        for row in all_rows:
            if row.step == step and row.label not in {each.label for each in rivals[environment]}:
                verdict = f"{asked(row, rivals[environment], seeds=seeds)} ({len(row.final)})"
                found.setdefault(row.label, {})[environment] = verdict
    body = [[label, *(verdicts.get(env, "") for env in rows)] for label, verdicts in found.items()]
    return markdown([f"at {step:,} steps", *rows], body)


def asked(row: Row, rivals: Sequence[Row], *, seeds: int) -> str:
    """Whether a row is above all rivals in both scores, below any in one, or neither has been shown.

    Nothing has been where it shares fewer than so many seeds with any of them, or lacks a seed of one: those
    that are missing may be those that failed.
    """
    if any(rival.final.keys() - row.final.keys() for rival in rivals):
        return OPEN
    pairs = [differences(ours, theirs) for rival in rivals for ours, theirs in _scores(row, rival)]
    if min(map(len, pairs)) < seeds:
        return OPEN
    intervals = [estimate(each).interval for each in pairs]
    if any(each is not None and each.high < 0 for each in intervals):
        return BELOW
    return ABOVE if all(each is not None and each.low > 0 for each in intervals) else OPEN


def _scores(row: Row, rival: Row) -> list[tuple[Mapping[int, float], Mapping[int, float]]]:
    return [(row.final, rival.final), (row.area, rival.area)]


# -- policies -----------------------------------------------------------------------------------------


def gain_table(rows: Mapping[str, Sequence[Row]]) -> str:
    """What the best agent and the ensemble gain over a run's mean agent, over all runs of an environment."""
    body = []
    for environment, found in rows.items():
        policies = [row.policies for row in found if ENSEMBLE in row.policies]
        mean, best, ensemble = (
            np.array([value for each in policies for value in each[kind]]) for kind in (MEAN, BEST, ENSEMBLE)
        )
        if len(mean):
            gains = [shown((kind - mean).tolist()) for kind in (best, ensemble)]
            body.append([environment, str(len(mean)), *gains])
    return markdown(["environment", "runs", f"{BEST} − {MEAN}", f"{ENSEMBLE} − {MEAN}"], body)


# -- curves -------------------------------------------------------------------------------------------


def draw(study: Study, folder: Path, name: str) -> list[Path]:
    """A picture of one agent beside each number of agents: by steps of each, and of all together."""
    paths = []
    runs = study.kept.runs
    for agents in sorted({run.agents for run in runs} - {1}):
        found = renamed(compare([run.path for run in runs if run.agents in (1, agents)]), study.kept)
        paths.append(folder / f"{name}-{agents}-agents.png")
        paths[-1].parent.mkdir(exist_ok=True)
        paths[-1].write_bytes(comparison_sheet(found, inks=PRINT).png_file(dots_per_inch=110))
    return paths


def renamed(found: Comparison, kept: Kept) -> Comparison:
    """The comparison with the names that its cells have in the study."""
    names = {run.path: each.name for each in kept.all_groups for run in each.group.runs}
    environments = tuple(
        replace(each, cells=tuple(replace(cell, label=names[cell.runs[0].path]) for cell in each.cells))
        for each in found.environments
    )
    return replace(found, environments=environments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fills the page; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kept", type=Path, metavar="FOLDER")
    parser.add_argument("--at", type=int, nargs="+", required=True, metavar="STEP")
    parser.add_argument("--rival", action="append", required=True, metavar="LABEL")
    parser.add_argument("--seeds", type=int, default=5, help="how many a verdict takes")
    options = parser.parse_args(arguments)
    kept: Path = options.kept
    page = kept.with_suffix(".md")
    try:
        study = Study(Kept.read(kept), options.at, options.rival, options.seeds)
        pictures = draw(study, kept.parents[1] / "images", kept.name)
        text = page.read_text(encoding="utf-8")
        for name, content in sections(study, pictures).items():
            text = put(text, name, content)
        page.write_text(text, encoding="utf-8")
    except (DaseError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
