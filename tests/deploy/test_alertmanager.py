"""A real Prometheus and a real Alertmanager: who is to be told of an alert is told."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from children import ran
from deploy.deployed import DEPLOY
from deploy.servers import every_second, free_ports, prometheus, replaced, running
from patience import PATIENCE_S

SEVERITIES = ("critical", "warning", "info")
PROMETHEUS = DEPLOY / "prometheus"


class Webhook(HTTPServer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Told)
        self.timeout = PATIENCE_S
        self.messages: list[Any] = []

    def next_message(self) -> Any:
        """The next message, waited for."""
        self.handle_request()
        assert self.messages, f"nothing came within {PATIENCE_S:g} s"
        return self.messages.pop(0)


class Told(BaseHTTPRequestHandler):
    """One message of an Alertmanager."""

    server: Webhook

    def do_POST(self) -> None:
        self.server.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing."""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as made:
        yield made


def committed(file: str) -> str:
    return (PROMETHEUS / file).read_text(encoding="utf-8")


def amtool(folder: Path, *arguments: str) -> str:
    """What amtool says of the example, which it must not refuse."""
    checked = ran(folder / "amtool", *arguments)
    assert checked.returncode == 0, checked.stderr
    return checked.stdout.strip()


def test_the_example_for_alertmanager_is_valid_and_sends_everything_but_infos(alertmanager_folder):
    example = str(PROMETHEUS / "alertmanager.yml")
    amtool(alertmanager_folder, "check-config", example)
    asked = ("config", "routes", "test", f"--config.file={example}")
    told = {each: amtool(alertmanager_folder, *asked, f"severity={each}") for each in SEVERITIES}
    assert told == {"critical": "team", "warning": "team", "info": "nobody"}


@pytest.mark.slow
def test_an_alert_of_a_replay_that_is_down_reaches_the_webhook(
    prometheus_folder, alertmanager_folder, webhook, tmp_path
):
    nobody, alerts, own = range(first := free_ports(3), first + 3)
    told = {
        "http://127.0.0.1:9094/": f"http://127.0.0.1:{webhook.server_port}/",
        "group_wait: 30s": "group_wait: 0s",
    }
    (tmp_path / "alertmanager.yml").write_text(replaced(committed("alertmanager.yml"), told))
    rules = replaced(committed("rules/dase.alerts.yml"), {"for: 1m": "for: 1s"})
    (tmp_path / "rules.yml").write_text(rules)
    places = {
        "127.0.0.1:9500": f"127.0.0.1:{nobody}",
        "127.0.0.1:9093": f"127.0.0.1:{alerts}",
        "rules/*.yml": "rules.yml",
    }
    (tmp_path / "prometheus.yml").write_text(replaced(every_second(committed("prometheus.yml")), places))
    alertmanager = [
        str(alertmanager_folder / "prometheus-alertmanager"),
        "--config.file=alertmanager.yml",
        "--storage.path=alerts",
        f"--web.listen-address=127.0.0.1:{alerts}",
        "--cluster.listen-address=",
    ]
    scraper = prometheus(prometheus_folder, f"127.0.0.1:{own}")
    with ExitStack() as stack:
        stack.enter_context(running(alertmanager, tmp_path, "alertmanager"))
        stack.enter_context(running(scraper, tmp_path, "prometheus"))
        message = webhook.next_message()
    (alert,) = message["alerts"]
    named = {"alertname": "DaseReplayDown", "job": "dase-replay", "severity": "critical"}
    assert (message["receiver"], alert["status"]) == ("team", "firing")
    assert alert["labels"] == {**named, "instance": f"127.0.0.1:{nobody}"}
    assert alert["annotations"]["runbook"] == "docs/operations.md#dasereplaydown"
