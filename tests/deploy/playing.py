"""A release of the chart in pods on this machine, watched by a Prometheus, and what its explorers know of."""

import base64
import fcntl
import json
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deploy.imaging import Builder
from deploy.monitor import write_found
from deploy.servers import ASKED_AGAIN_S, asked
from patience import PATIENCE_S
from pods.machine import Machine
from pods.podman import Podman
from pods.translation import Files, Release
from pods.volumes import write_volume
from prometheus_client.parser import text_string_to_metric_families

from dase_grpc.replay.security.certificates import issue
from dase_grpc.replay.security.identity import Identity

GROUP = 65_532
LEDGER = "/ledger"
ACKNOWLEDGED = "dase_explorer_acknowledged_transitions"


def secret(
    certificates: Path, node: str, hosts: Sequence[str] = (), *, replace: bool = False
) -> dict[str, Any]:
    """A node's Secret with a new certificate, as `kubectl create secret generic --from-file` makes it."""
    identity = Identity.parse(node.replace("-", "/"))
    folder = issue(certificates, identity, hosts, now=datetime.now(UTC), replace=replace)
    data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in folder.iterdir()}
    return {"kind": "Secret", "metadata": {"name": f"dase-tls-{node}"}, "data": data}


def with_ledger(manifest: dict[str, Any], ledger: Path) -> dict[str, Any]:
    """A workload whose pods count their environments' steps in a folder of this machine besides."""
    spec = deepcopy(manifest)["spec"]
    if manifest["kind"] in ("Job", "Deployment"):
        pod = spec["template"]["spec"]
        pod["volumes"].append({"name": "ledger", "hostPath": {"path": str(ledger)}})
        pod["containers"][0]["volumeMounts"].append({"name": "ledger", "mountPath": LEDGER})
    return {**manifest, "spec": spec}


@contextmanager
def alone_with_podman(builder: Builder, folder: Path, *targets: str) -> Iterator[Podman]:
    """A podman that has images of these targets and nothing else, and that no other test uses meanwhile."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed; run scripts/get_podman.sh")
    for target in targets:
        builder.build(target)
    podman = Podman(folder, "dase-test-pods", storage=builder.storage)
    with (builder.folder / "playing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        podman.prepare()
        _clean(podman)  # of a test that was killed
        try:
            yield podman
        finally:
            _clean(podman)
            podman.run("network", "rm", podman.network)


def _clean(podman: Podman) -> None:
    podman.run("pod", "rm", "--force", "--all", "--time=0")
    podman.run("volume", "rm", "--force", "--all")


@dataclass
class Played:
    """Pods that run.

    `prometheus` is where one that watches them answers, if any does.
    `acknowledged` is what environments, by their numbers in the ledger, were last seen to know of as
    committed.
    """

    machine: Machine
    podman: Podman
    folder: Path
    prometheus: str = ""
    acknowledged: dict[int, int] = field(default_factory=dict)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Lets the machine run until something holds; says so with all logs if that does not come."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"{what}\n{self.said()}"
            assert not self.machine.given_up, self.said()
            self.machine.step()
            write_found(self.folder, self.machine.lives.values())
            time.sleep(0.5)

    def until_ready(self, *names: str) -> None:
        """Waits until these pods are there and ready."""
        lives = self.machine.lives
        self.until(lambda: all(name in lives and lives[name].ready for name in names), f"{names} ready")

    def until_series(self, expression: str) -> None:
        """Waits until Prometheus has series for an expression."""
        self.until(lambda: bool(self.series(expression)), f"{expression} has no series")

    def series(self, expression: str) -> list[Any]:
        """What Prometheus answers; nothing while it does not."""
        try:
            return list(asked(self.prometheus, "query", timeout_s=ASKED_AGAIN_S, query=expression)["result"])
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return []

    def by(self, label: str, expression: str) -> dict[str, float]:
        """The values of an expression's series, by one of their labels."""
        return {each["metric"][label]: float(each["value"][1]) for each in self.series(expression)}

    def note(self, name: str) -> int:
        """Notes how many transitions a pod that explores knows to be committed; its environment's number."""
        life = self.machine.lives[name]
        (number,) = _environments(self.podman.states()[life.container].pid)
        self.acknowledged[number] = max(self.acknowledged.get(number, 0), _acknowledged(life.address))
        return number

    def status(self, replay: str) -> dict[str, Any]:
        """What `dase status` says of the replay at an address, from within the pods' network."""
        tls = self.folder / "volumes" / "observer" / "tls"
        network, mounted = f"--network={self.podman.network}", f"--volume={tls}:/tls:ro"
        command = ("status", "--json", "--tls=/tls", f"--replay={replay}")
        return dict(json.loads(self.podman.run("run", "--rm", network, mounted, "dase:replay", *command)))

    def said(self) -> str:
        """What all pods have written."""
        names = sorted({*self.machine.lives, *(path.stem for path in (self.folder / "logs").glob("*"))})
        return "\n".join(f"== {name}\n{self.machine.log(name)[-3000:]}" for name in names)

    def within(self, name: str, *command: str) -> str:
        """What a command prints in a pod's container."""
        return self.podman.run("exec", self.machine.lives[name].container, *command)

    def claim(self, name: str) -> Path:
        """Where the volume of a claim lies."""
        return Path(self.podman.run("volume", "inspect", "--format={{.Mountpoint}}", name).strip())


def observer(certificates: Path, folder: Path) -> None:
    """Puts an observer's certificate where `Played.status` mounts it from."""
    files = issue(certificates, Identity.parse("observer"), [], now=datetime.now(UTC))
    held = Files({file.name: file.read_bytes() for file in files.iterdir()}, mode=0o440)
    write_volume(folder / "volumes" / "observer" / "tls", held, group=GROUP)


def _environments(pid: int) -> set[int]:
    """The numbers of a process's environments: their entries in the ledger are mapped into its memory."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return {int(number) for number in re.findall(r"/(\d+)$", maps, re.MULTILINE)}


def _acknowledged(address: str) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}:9500/metrics", timeout=PATIENCE_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for each in families if each.name == ACKNOWLEDGED for sample in each.samples]
        return int(sum(each.value for each in samples if each.name.endswith("_total")))


def release_of(manifests: Iterable[dict[str, Any]], more: Iterable[dict[str, Any]], ledger: Path) -> Release:
    """The manifests of a chart, with a ledger for those who explore, and others."""
    return Release((*(with_ledger(each, ledger) if "spec" in each else each for each in manifests), *more))
