"""What is deployed beside the nodes: dashboards, rules, and the names in them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from write_metrics import families, registries

PROJECT = Path(__file__).resolve().parents[2]
DEPLOY = PROJECT / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
RULE_TESTS = DEPLOY / "prometheus" / "tests" / "alerts.test.yml"
ALERTS = (DEPLOY / "prometheus" / "rules" / "dase.alerts.yml").read_text(encoding="utf-8")

_METRIC = re.compile(r"(?<![\w:#./])(?:dase|grpc_server|process)_[a-z0-9_]+(?!\w|:)")
_UNUSUAL = re.compile("dase-serve|dase_replay_(denied_calls|revocation_lists)_")
"""Of policy servers, of callers that were refused, and of a replay with --crl."""
_SUFFIXES = re.compile(r"_(bucket|sum|count)$")


@dataclass(frozen=True)
class Expression:
    """A query of a dashboard, as Prometheus can run it; `where` names its panel."""

    where: str
    text: str

    @property
    def usual(self) -> bool:
        """Whether a run that is well has series of it."""
        return not _UNUSUAL.search(self.text)


def dashboards() -> dict[str, Any]:
    """The committed dashboards, by the names of their files."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS}


def expressions(*, rate_interval: str = "1m") -> list[Expression]:
    """Every query of every panel; Grafana's variables stand for all that there is."""
    return [
        Expression(f"{name}: {panel['title']}", runnable(target["expr"], rate_interval))
        for name, board in dashboards().items()
        for panel in board["panels"]
        for target in panel["targets"]
    ]


def runnable(expression: str, rate_interval: str) -> str:
    """An expression without Grafana's variables."""
    return re.sub(
        r"\$(run|replay|learner|actor|evaluator|server|agent)\b",
        ".*",
        expression.replace("$__rate_interval", rate_interval),
    )


def metrics_in(text: str) -> set[str]:
    """The metrics that a text speaks of, histograms by their own names."""
    known = exported()
    found = set(_METRIC.findall(text))
    return {name if name in known else _SUFFIXES.sub("", name) for name in found}


def exported() -> set[str]:
    """All metrics of all roles, as they are queried."""
    return {family.name for made in registries().values() for family in families(made)}
