"""A real Prometheus scrapes a real `dase train`: every panel of every dashboard has something to show."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from children import importing
from deploy.deployed import DEPLOY, exported, expressions
from small import small_flags

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TESTS = Path(__file__).resolve().parents[1]
PATIENCE_S = 150.0
AGENTS = 2
PUBLISHED = "dase_replay_policy_version"
DENIED = "dase_replay_denied_calls_total"


@dataclass(frozen=True)
class Monitored:
    """A run that is scraped, and who scrapes it."""

    prometheus: str
    nodes: list[int]

    def api(self, path: str, **query: str) -> Any:
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def series(self, expression: str) -> list[Any]:
        return list(self.api("query", query=expression)["result"])

    def metrics(self, port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has."""
    for first in range(19_500, 32_000, 17):
        try:
            for port in range(first, first + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@contextmanager
def running(command: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is interrupted at the end of the block, once more if that does not end it soon."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=importing(TESTS)
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # which kills its nodes, too
            process.wait(30)


def scrape_config(ports: list[int]) -> str:
    """The committed configuration with these ports, and every second."""
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    for port, standing in zip(ports, range(9_500, 9_500 + len(ports)), strict=True):
        assert f'"127.0.0.1:{standing}"' in text
        text = text.replace(f'"127.0.0.1:{standing}"', f'"127.0.0.1:{port}"')
    text = text.replace("scrape_interval: 5s", "scrape_interval: 1s")
    text = text.replace("evaluation_interval: 15s", "evaluation_interval: 1s")
    return text.replace("rules/*.yml", str(DEPLOY / "prometheus" / "rules" / "*.yml"))


@pytest.fixture(scope="module")
def monitored(prometheus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    folder = tmp_path_factory.mktemp("monitored")
    first = free_ports(AGENTS + 2)
    nodes, own = list(range(first, first + AGENTS + 1)), first + AGENTS + 1
    (folder / "prometheus.yml").write_text(scrape_config(nodes))
    settings = small_flags(
        train__steps=10_000_000, train__checkpoint_every=200, eval__every=500, metrics__port=first
    )
    train = [sys.executable, "-m", "dase_grpc", "train", f"--name={folder.name}", *settings]
    prometheus = [
        str(prometheus_folder / "prometheus"),
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    with running(train, folder, "train") as run, running(prometheus, folder, "prometheus") as server:
        made = Monitored(f"http://127.0.0.1:{own}", nodes)
        deadline = time.monotonic() + PATIENCE_S
        waiting = {f"dase_learner_updates_total{{agent_id='{agent}'}} > 100" for agent in range(AGENTS)}
        while waiting:
            assert time.monotonic() < deadline, (folder / "train.log").read_text()
            assert (run.poll(), server.poll()) == (None, None)
            with suppress(OSError):
                waiting = {expression for expression in waiting if not made.series(expression)}
            time.sleep(0.5)
        yield made


def unanswered(monitored: Monitored, wanted: dict[str, str]) -> dict[str, str]:
    """Of expressions by name those that still have no series after a while."""
    deadline = time.monotonic() + 20.0
    while wanted and time.monotonic() < deadline:
        wanted = {name: text for name, text in wanted.items() if not monitored.series(text)}
        time.sleep(0.5 if wanted else 0.0)
    return wanted


def test_every_expression_of_every_dashboard_has_series(monitored):
    wanted = {f"{each.where}: {each.text}": each.text for each in expressions(rate_interval="10s")}
    assert unanswered(monitored, wanted) == {}


def test_prometheus_evaluates_every_rule_and_every_recorded_one_has_series(monitored):
    names = [
        rule["name"] for group in monitored.api("rules", type="record")["groups"] for rule in group["rules"]
    ]
    assert len(names) == 8
    assert unanswered(monitored, {name: name for name in names}) == {}
    rules = [rule for group in monitored.api("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == 18
    assert {(rule["name"], rule.get("lastError", "")) for rule in rules if rule["health"] != "ok"} == set()


def test_a_run_that_is_well_fires_no_alert(monitored):
    assert monitored.series('ALERTS{alertstate="firing"}') == []


def test_every_metric_of_the_page_is_scraped_but_those_of_a_pair_and_of_refusals(monitored):
    wanted = {name: f'count({{__name__=~"{name}(_count)?"}})' for name in exported()}
    absent = {name for name in wanted if name.startswith("dase_distillation_")} | {PUBLISHED, DENIED}
    assert unanswered(monitored, {name: wanted[name] for name in wanted.keys() - absent}) == {}
    assert [name for name in absent if monitored.series(wanted[name])] == []


def test_promtool_finds_nothing_wrong_with_what_nodes_export(monitored, promtool):
    for port in monitored.nodes:
        checked = promtool("check", "metrics", stdin=monitored.metrics(port))
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
