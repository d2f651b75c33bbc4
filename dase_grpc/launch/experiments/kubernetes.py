"""Kubernetes: the cells that are missing as one Indexed Job, a pod for each, written as YAML or applied.

Which cell an index is stands in a ConfigMap beside the experiment's file as it was, so that a Job means the
same cells as long as it lives.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from dase_grpc.errors import ConfigError, SchedulerError
from dase_grpc.launch.experiments.matrix import RunCell
from dase_grpc.launch.experiments.runner import STOP_CELL_S
from dase_grpc.launch.experiments.schedulers import told
from dase_grpc.launch.experiments.sites import KubernetesSite
from dase_grpc.launch.experiments.task import NOTHING_KEPT, STOPPED
from dase_grpc.progress import several

if TYPE_CHECKING:
    import yaml

LARGEST_BYTES: Final = 900_000
"""Of the file and the names of cells; Kubernetes takes a ConfigMap of 1 MiB."""

CONFIG, RUNS = "/etc/dase", "/runs"
KEPT_S: Final = 7 * 24 * 3_600
"""How long a Job that has ended stays, with what its pods have said; results lie on the volume."""

EXPERIMENT_LABEL: Final = "dase/experiment"
USER: Final = 65532
_CONTAINER: Final = "cell"


@dataclass(frozen=True)
class CellsJob:
    """The Job of an experiment's missing cells, in their order, and what it needs.

    `file` is the text of the experiment's file, `name` the experiment's.
    """

    name: str
    file: str
    cells: Sequence[RunCell]
    site: KubernetesSite

    @property
    def job_name(self) -> str:
        """Another one for other cells, files or settings: a Job cannot be changed."""
        told = json.dumps([self.file, self._names, self.site.model_dump(mode="json")])
        return f"{self.label}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"

    @property
    def label(self) -> str:
        """By which the experiment's Jobs are known; two experiments of like names may share it."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower())[:40].strip("-") or "experiment"
        return f"dase-{plain}"

    def manifests(self) -> list[dict[str, Any]]:
        """The ConfigMap and the Job. ConfigError where they would be too large."""
        data = {"experiment.toml": self.file, "cells": "".join(f"{name}\n" for name in self._names)}
        size = sum(len(text.encode()) for text in data.values())
        if size > LARGEST_BYTES:
            raise ConfigError(
                f"the file and the names of {several(len(self.cells), 'cell')} have {size:,} bytes, more "
                f"than the {LARGEST_BYTES:,} of a ConfigMap; write several files"
            )
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self._metadata(), "data": data}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._metadata(), "spec": self._job()}
        return [config, job]

    @property
    def _names(self) -> list[str]:
        return [cell.name for cell in self.cells]

    def _metadata(self) -> dict[str, Any]:
        return {"name": self.job_name, "namespace": self.site.namespace, "labels": self._labels()}

    def _labels(self) -> dict[str, str]:
        about = {
            "name": "dase",
            "instance": self.job_name,
            "component": _CONTAINER,
            "version": version("dase-grpc"),
            "part-of": "dase",
            "managed-by": "dase-experiment",
        }
        labels = {f"app.kubernetes.io/{key}": value for key, value in about.items()}
        return labels | {EXPERIMENT_LABEL: self.label}

    def _job(self) -> dict[str, Any]:
        stopped = {"containerName": _CONTAINER, "operator": "In", "values": [NOTHING_KEPT, STOPPED]}
        refused = {"containerName": _CONTAINER, "operator": "In", "values": [2]}
        return {
            "completionMode": "Indexed",
            "completions": len(self.cells),
            "parallelism": min(self.site.at_once, len(self.cells)),
            "backoffLimitPerIndex": self.site.retries,
            # Two pods of one cell would wait for each other.
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": KEPT_S,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onExitCodes": stopped},
                    {"action": "FailIndex", "onExitCodes": refused},
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"metadata": {"labels": self._labels()}, "spec": self._pod()},
        }

    def _pod(self) -> dict[str, Any]:
        items = [{"key": "experiment.toml", "path": f"{self.name}.toml"}, {"key": "cells", "path": "cells"}]
        selector = {"nodeSelector": self.site.node_selector} if self.site.node_selector else {}
        return {
            **selector,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": int(STOP_CELL_S) + 30,
            "securityContext": {
                "runAsNonRoot": True,
                **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), USER),
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._container()],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": self.site.claim}},
                {"name": "experiment", "configMap": {"name": self.job_name, "items": items}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "2Gi"}},
            ],
        }

    def _container(self) -> dict[str, Any]:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        gpu = self.site.gpu_flag(self.cells[0].mode)
        return {
            "name": _CONTAINER,
            "image": self.site.image,
            "command": ["dase"],
            "args": [
                "experiment",
                f"{CONFIG}/{self.name}.toml",
                f"--runs={RUNS}",
                f"--cell=@{CONFIG}/cells:$(DASE_CELL)",
                *([] if gpu is None else [f"--gpu={gpu}"]),
            ],
            "env": [{"name": "DASE_CELL", "valueFrom": {"fieldRef": {"fieldPath": index}}}],
            "resources": self._resources(),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": "runs", "mountPath": RUNS},
                {"name": "experiment", "mountPath": CONFIG, "readOnly": True},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }

    def _resources(self) -> dict[str, Any]:
        memory = f"{self.site.memory_mib}Mi"
        cpus = self.site.cpus or max(cell.weight for cell in self.cells)
        gpus = {"nvidia.com/gpu": self.site.gpus} if self.site.gpus else {}
        return {"requests": {"cpu": str(cpus), "memory": memory}, "limits": {"memory": memory, **gpus}}


def yaml_text(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Documents of YAML. ConfigError where the library for it is not installed."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            '--on kubernetes needs PyYAML, so run: pip install "dase-grpc[kubernetes]"'
        ) from None

    class Dumper(yaml.SafeDumper):
        """Writes texts of several lines as they are."""

    Dumper.add_representer(str, _represented)
    return yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def _represented(dumper: "yaml.SafeDumper", text: str) -> "yaml.ScalarNode":
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def apply(job: CellsJob) -> None:
    """Gives the Job to the cluster that kubectl speaks to; one of the same name that has ended makes room.

    Raises:
        ConfigError: there is no kubectl.
        SchedulerError: it fails, or a Job of the experiment still runs.
    """
    if shutil.which("kubectl") is None:
        raise ConfigError("--apply finds no kubectl in the PATH; leave it out, and apply what is printed")
    text, namespace = yaml_text(job.manifests()), f"--namespace={job.site.namespace}"
    listed = _kubectl("get", "jobs", namespace, f"--selector={EXPERIMENT_LABEL}={job.label}", "--output=json")
    for each in json.loads(listed)["items"]:
        name = each["metadata"]["name"]
        if not _has_ended(each):
            raise SchedulerError(
                f"job {name} still runs cells of this experiment; wait for its end, or end it: kubectl "
                f"{namespace} delete job {name}"
            )
        if name == job.job_name:
            _kubectl("delete", "job", name, namespace, "--wait")
    _kubectl("apply", "--filename=-", given=text)


def _has_ended(job: Mapping[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)


def _kubectl(verb: str, *arguments: str, given: str = "") -> str:
    return told(["kubectl", verb, *arguments], asked=f"kubectl {verb}", given=given)
