"""A real Prometheus scrapes a real run with an actor and an evaluator: every panel has something to show."""

import re
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deploy.deployed import DEPLOY, exported, expressions
from deploy.servers import asked, every_second, free_ports, prometheus, running
from patience import PATIENCE_S
from prometheus_client import CollectorRegistry, start_http_server
from small import small_flags
from write_metrics import DISTILLED

from dase_grpc.metrics.nodes import DistillationMetrics

pytestmark = pytest.mark.slow

AGENTS = 2
DENIED = "dase_replay_denied_calls_total"
STANDING = (9_500, 9_501, 9_502, 9_520, 9_530)
"""The ports of the committed configuration: a replay, its learners, an actor, an evaluator."""


@dataclass(frozen=True)
class Monitored:
    """A run that is scraped, and who scrapes it."""

    prometheus: str
    nodes: list[int]

    def api(self, path: str, **query: str) -> Any:
        return asked(self.prometheus, path, **query)

    def series(self, expression: str) -> list[Any]:
        return list(self.api("query", query=expression)["result"])

    def metrics(self, port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())


def scrape_config(ports: Sequence[int], pair: int) -> str:
    """The committed configuration with all jobs, these ports, and every second; `pair` shows distillation."""
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8").replace("\n  # ", "\n  ")
    for port, standing in zip(ports, STANDING, strict=True):
        assert f'"127.0.0.1:{standing}"' in text
        text = text.replace(f'"127.0.0.1:{standing}"', f'"127.0.0.1:{port}"')
    text = text.replace(f'"127.0.0.1:{ports[1]}"', f'"127.0.0.1:{ports[1]}", "127.0.0.1:{pair}"')
    return every_second(text).replace("rules/*.yml", str(DEPLOY / "prometheus" / "rules" / "*.yml"))


def replay_of(log: Path) -> str:
    """Where the replay of a `dase train` is, once it says so."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := re.search(r"dase top --replay (\S+)", log.read_text())):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found[1]


@pytest.fixture(scope="module")
def distilling() -> Iterator[int]:
    """The port of what a pair's learner shows of distillation, and of nothing else."""
    registry = CollectorRegistry()
    DistillationMetrics(registry, 0).show(DISTILLED)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield int(server.server_port)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def monitored(
    prometheus_folder: Path, distilling: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Monitored]:
    folder = tmp_path_factory.mktemp("monitored")
    first = free_ports(len(STANDING) + 1)
    *nodes, own = range(first, first + len(STANDING) + 1)
    (folder / "prometheus.yml").write_text(scrape_config(nodes, distilling))
    # What takes the time is Prometheus: meanwhile agents do not train as fast as they can.
    paced = {"env__kwargs": "{pause_s=0.02}", "eval__every": 100, "eval__episodes": 1}
    flags = small_flags(train__steps=10_000_000, train__checkpoint_every=200, metrics__port=first, **paced)
    dase = [sys.executable, "-m", "dase_grpc"]
    scraper = prometheus(prometheus_folder, f"127.0.0.1:{own}")
    with ExitStack() as stack:
        train = [*dase, "train", f"--name={folder.name}", *flags]
        processes = {
            "train": stack.enter_context(running(train, folder, "train")),
            "prometheus": stack.enter_context(running(scraper, folder, "prometheus")),
        }
        replay = f"--replay={replay_of(folder / 'train.log')}"
        for port, *role in (
            (nodes[-2], "--role=actor", "--agent=0"),
            (nodes[-1], "--role=evaluator", "--run-dir=evaluated"),
        ):
            node = [*dase, "node", *role, replay, f"--metrics-port={port}", *flags]
            processes[role[0]] = stack.enter_context(running(node, folder, role[0].strip("-")))
        made = Monitored(f"http://127.0.0.1:{own}", nodes)
        until_busy(made, processes, folder)
        yield made
        for name in ("--role=actor", "--role=evaluator"):  # side by side, and before their replay
            processes[name].send_signal(signal.SIGINT)


def until_busy(monitored: Monitored, processes: dict[str, Any], folder: Path) -> None:
    """Waits until both learners train, the actor explores and the evaluator has evaluated."""
    deadline = time.monotonic() + PATIENCE_S
    waiting = {f"dase_learner_updates_total{{agent_id='{agent}'}} > 100" for agent in range(AGENTS)} | {
        "dase_explorer_episodes_total{job='dase-actor'} > 0",
        "dase_evaluation_duration_seconds_count{job='dase-evaluator'} > 1",
    }
    while waiting:
        logs = {path.name: path.read_text() for path in folder.glob("*.log")}
        assert time.monotonic() < deadline, (waiting, logs)
        assert [name for name, each in processes.items() if each.poll() is not None] == [], logs
        with suppress(OSError):
            waiting = {expression for expression in waiting if not monitored.series(expression)}
        time.sleep(0.5)


def unanswered(monitored: Monitored, wanted: dict[str, str]) -> dict[str, str]:
    """Of expressions by name those that have no series however long they are waited for."""
    deadline = time.monotonic() + PATIENCE_S
    while wanted and time.monotonic() < deadline:
        wanted = {name: text for name, text in wanted.items() if not monitored.series(text)}
        time.sleep(0.5 if wanted else 0.0)
    return wanted


def test_every_expression_of_every_dashboard_that_a_run_has_series_of_has_some(monitored):
    wanted = {
        f"{each.where}: {each.text}": each.text for each in expressions(rate_interval="10s") if each.usual
    }
    assert unanswered(monitored, wanted) == {}


def test_prometheus_evaluates_every_rule_and_every_recorded_one_has_series(monitored):
    names = [
        rule["name"] for group in monitored.api("rules", type="record")["groups"] for rule in group["rules"]
    ]
    assert len(names) == 10
    assert unanswered(monitored, {name: name for name in names}) == {}
    rules = [rule for group in monitored.api("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == 28
    assert {(rule["name"], rule.get("lastError", "")) for rule in rules if rule["health"] != "ok"} == set()


def test_a_run_that_is_well_fires_no_alert(monitored):
    assert monitored.series('ALERTS{alertstate="firing"}') == []


def test_every_metric_of_the_page_is_scraped_but_refusals_of_callers(monitored):
    elsewhere = ("dase_inference_", "dase_replay_revocation_lists_")  # of dase serve; of a replay with --crl
    of_nodes = {name for name in exported() if not name.startswith(elsewhere)}
    wanted = {name: f'count({{__name__=~"{name}(_count)?"}})' for name in of_nodes - {DENIED}}
    assert unanswered(monitored, wanted) == {}
    assert monitored.series(DENIED) == []


def test_promtool_finds_nothing_wrong_with_what_nodes_export(monitored, promtool):
    for port in monitored.nodes:
        checked = promtool("check", "metrics", input=monitored.metrics(port))
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
