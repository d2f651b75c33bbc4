"""A run whose nodes are each on a host of their own, with certificates, watched by a Prometheus."""

import signal
import subprocess
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w
from deploy.deployed import DEPLOY
from deploy.servers import ASKED_AGAIN_S, asked, every_second, prometheus
from nodes.processes import NodeProcess, process
from patience import PATIENCE_S

from dase_grpc.process.lifecycle import READY_PREFIX
from dase_grpc.replay.security.certificates import issue, make_authority
from dase_grpc.replay.security.identity import Identity

PORT, METRICS = 50_051, 9_500
OTHERS_PORT = 9_090


@dataclass
class Cluster:
    """What runs where; `hosts` are those of scripts/hosts.py."""

    hosts: Any
    folder: Path
    nodes: dict[str, NodeProcess] = field(default_factory=dict)

    @property
    def certificates(self) -> Path:
        return self.folder / "certs"

    @property
    def address(self) -> str:
        return f"{self.hosts.addresses['replay']}:{PORT}"

    def series(self, expression: str) -> list[Any]:
        """What Prometheus answers; nothing while it does not."""
        base = f"http://{self.hosts.addresses['prometheus']}:{OTHERS_PORT}"
        try:
            return list(asked(base, "query", timeout_s=ASKED_AGAIN_S, query=expression)["result"])
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return []

    def value(self, expression: str) -> float:
        """The sum of an expression's series; 0 where there is none."""
        return sum(float(series["value"][1]) for series in self.series(expression))

    def until(self, expression: str) -> None:
        """Waits until an expression has series; fails with the logs where a node has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.series(expression):
            ended = {
                name: node.exit_code() for name, node in self.nodes.items() if node.popen.poll() is not None
            }
            assert not ended, (ended, {name: self.nodes[name].log for name in ended})
            assert time.monotonic() < deadline, f"{expression} has no series after {PATIENCE_S:g} s"
            time.sleep(0.5)

    def grows(self, metric: str, *, by: float = 50.0) -> None:
        """Waits until a counter has grown."""
        self.until(f"{metric} > {self.value(metric) + by}")

    def end(self, *names: str) -> None:
        """Asks nodes to stop; each has to end with code 0."""
        for name in names:
            self.nodes[name].send(signal.SIGTERM)
        for name in names:
            code = self.nodes[name].exit_code()
            assert (name, code) == (name, 0), self.nodes[name].log
            assert "Traceback" not in self.nodes[name].log


def make_certificates(folder: Path, addresses: dict[str, str], identities: Sequence[str]) -> None:
    """One authority for the nodes, another for those who read their metrics, as docs/security.md has it."""
    now = datetime.now(UTC)
    for name in ("certs", "metrics-certs"):
        make_authority(folder / name, now=now)
    for identity in identities:
        hosts = [addresses["replay"]] if identity == "replay" else []
        issue(folder / "certs", Identity.parse(identity), hosts, now=now)
    issue(folder / "metrics-certs", Identity.parse("replay"), list(addresses.values()), now=now)
    issue(folder / "metrics-certs", Identity.parse("observer"), [], now=now)


@contextmanager
def started(
    made: Any, folder: Path, settings: dict[str, Any], roles: dict[str, Sequence[str]], program: Path
) -> Iterator[Cluster]:
    """A replay and these nodes, by host: the flags of each; ended, if by force, with the block."""
    identities = {name: name.replace("-", "/") for name in ("replay", *roles)}
    make_certificates(folder, made.addresses, list(identities.values()))
    (folder / "settings.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    cluster = Cluster(made, folder)
    with ExitStack() as stack:
        buffer = [f"--{key.replace('_', '-')}={value}" for key, value in settings["replay"].items()]
        stored = [f"--data-dir={folder / 'data'}", f"--listen={cluster.address}", "--run-id=apart"]
        replay = _node(cluster, stack, "replay", "--role=replay", *stored, *buffer)
        assert replay.popen.stdout is not None
        assert replay.popen.stdout.readline().startswith(READY_PREFIX), replay.log
        for name, flags in roles.items():
            config = [f"--config={folder / 'settings.toml'}", f"--replay={cluster.address}"]
            _node(cluster, stack, name, *config, *flags)
        stack.enter_context(_prometheus(cluster, program, roles))
        yield cluster


def _node(cluster: Cluster, stack: ExitStack, name: str, *flags: str) -> NodeProcess:
    where = cluster.hosts.addresses[name]
    node = process(
        *flags,
        f"--tls={cluster.certificates / name}",
        f"--metrics-host={where}",
        f"--metrics-port={METRICS}",
        f"--metrics-tls={cluster.folder / 'metrics-certs' / 'replay'}",
        within=cluster.hosts.within(name),
    )
    cluster.nodes[name] = stack.enter_context(node)
    return cluster.nodes[name]


@contextmanager
def _prometheus(cluster: Cluster, program: Path, roles: dict[str, Sequence[str]]) -> Iterator[None]:
    """The committed configuration for several hosts, with these addresses, every second."""
    text = (DEPLOY / "prometheus" / "several-hosts.yml").read_text(encoding="utf-8")
    text = every_second(text).replace("rules/*.yml", str(DEPLOY / "prometheus" / "rules" / "*.yml"))
    for role in ("replay", "learner", "actor", "evaluator"):
        targets = [
            f'"{cluster.hosts.addresses[name]}:{METRICS}"'
            for name in ("replay", *roles)
            if name.partition("-")[0] == role
        ]
        head, job, tail = text.partition(f"job_name: dase-{role}\n")
        assert job or not targets, role
        text = head + job + _with_targets(tail, targets) if job else text
    folder = cluster.folder / "prometheus"
    folder.mkdir()
    (folder / "prometheus.yml").write_text(text, encoding="utf-8")
    (folder / "dase").symlink_to(cluster.folder / "metrics-certs" / "observer")
    own = f"{cluster.hosts.addresses['prometheus']}:{OTHERS_PORT}"
    command = [*cluster.hosts.within("prometheus"), *prometheus(program, own)]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


def _with_targets(text: str, targets: Sequence[str]) -> str:
    """The first list of targets in a text, replaced."""
    head, _, tail = text.partition("- targets: [")
    return f"{head}- targets: [{', '.join(targets)}]{tail.partition(']')[2]}"
