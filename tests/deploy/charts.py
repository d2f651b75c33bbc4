"""The chart as helm renders it for several sets of values, and what is asked about it."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from children import ran
from deploy.deployed import PROJECT

CHART = PROJECT / "deploy" / "helm" / "dase"
CONFIG = '[env]\nid = "Pendulum-v1"\n\n[train]\nsteps = 5_000\n'
MONITORED = "metrics.podMonitor.enabled=true,metrics.rules.enabled=true,metrics.dashboards.enabled=true"
VALUES: Mapping[str, tuple[str, ...]] = {
    "as it is": (),
    "plain": ("tls.enabled=false", "networkPolicy.enabled=false", "replay.minSize=1000000"),
    "actors alone explore": ("learners.explore=false,actors.perAgent=1,evaluator.enabled=true",),
    "everything": (
        "replay.shards=3,replay.pdb.enabled=true,replay.capacity=500000",
        "learners.count=2,learners.gpu.count=1,learners.gpu.runtimeClassName=nvidia",
        "actors.perAgent=2,actors.envs=4,actors.autoscaling.enabled=true,evaluator.enabled=true",
        "tls.certManager.enabled=true,tls.crlConfigMap=withdrawn,run.id=study-1,run.preset=paper/td3",
        "extraEnv.GRPC_VERBOSITY=INFO,imagePullSecrets[0].name=pull",
        f"image.digest=sha256:{'ab' * 32},replay.image.repository=registry.example/dase-replay",
        "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=monitoring",
        MONITORED,
    ),
    "endless": ("learners.mode=statefulset,learners.count=4,replay.shards=2", "actors.perAgent=1"),
    "own volumes": ("learners.mode=statefulset,results.perLearner=true,evaluator.enabled=true",),
}
"""What is given with --set; the one that has everything also gets CONFIG as its file of settings."""

VARIABLE = re.compile(r"\$\((\w+)\)")


@dataclass(frozen=True)
class Helm:
    """helm, and the chart."""

    program: Path

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return ran(self.program, *arguments, cwd=PROJECT)

    def template(self, *sets: str, version: str = "1.36.0") -> subprocess.CompletedProcess[str]:
        given = [f"--set={each}" for each in sets]
        return self.run("template", "run", CHART, "--namespace=lab", f"--kube-version={version}", *given)

    def rendered(self, *sets: str, config: str = "") -> "Rendered":
        """What these values give; a comma in `config` needs a backslash."""
        made = self.template(*sets, *([f"run.config={config}"] if config else ()))
        assert made.returncode == 0, made.stderr
        return Rendered(tuple(each for each in yaml.safe_load_all(made.stdout) if each))


@dataclass(frozen=True)
class Rendered:
    """The manifests of one release."""

    manifests: tuple[dict[str, Any], ...]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.manifests if each["kind"] == kind]

    def named(self, kind: str, name: str) -> dict[str, Any]:
        (found,) = (each for each in self.of(kind) if each["metadata"]["name"] == name)
        return found

    @cached_property
    def workloads(self) -> list["Workload"]:
        """Everything that has pods."""
        return list(_workloads(self.manifests))

    def role(self, role: str) -> list["Workload"]:
        return [each for each in self.workloads if each.role == role]


@dataclass(frozen=True)
class Workload:
    """One manifest that has pods, and their template."""

    manifest: dict[str, Any]
    template: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.manifest['kind']}/{self.manifest['metadata']['name']}"

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def role(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.template["spec"])

    @property
    def container(self) -> dict[str, Any]:
        (only,) = self.spec["containers"]
        return dict(only)

    @property
    def sidecars(self) -> list[dict[str, Any]]:
        """Containers that start before the node and end after it."""
        return list(self.spec.get("initContainers", []))

    @property
    def variables(self) -> set[str]:
        return {each["name"] for each in self.container.get("env", [])}

    def arguments(self, index: int) -> list[str]:
        """What the pod of this index starts `dase` with."""
        return [VARIABLE.sub(str(index), each) for each in self.container["args"]]


def _workloads(manifests: tuple[dict[str, Any], ...]) -> Iterator[Workload]:
    for each in manifests:
        if each["kind"] == "Pod":
            yield Workload(each, each)
        elif each["kind"] in ("Job", "StatefulSet", "Deployment"):
            yield Workload(each, each["spec"]["template"])
