"""Pods of a rendered chart, or of an experiment: what controllers would make of them, as podman knows it.

Podman plays Pods. It knows no StatefulSet, no Indexed Job and no headless Service, takes a Deployment for one
pod, publishes every port on the host, expands no `$(NAME)`, and mounts neither projected volumes nor parts of
volumes. What those mean is worked out here; nothing is started, read or written.
"""

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Manifest = Mapping[str, Any]

HOOK: Final = "helm.sh/hook"
JOB_INDEX: Final = "batch.kubernetes.io/job-completion-index"
POD_INDEX: Final = "apps.kubernetes.io/pod-index"
PROBES: Final = ("startupProbe", "livenessProbe", "readinessProbe")
SECONDS_OF_GRACE: Final = 30
"""What Kubernetes gives a pod that says nothing about it."""

_VARIABLE: Final = re.compile(r"\$\(([A-Za-z_]\w*)\)")
_FIELD: Final = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_NOT_PODMANS: Final = {"ports", "lifecycle", "restartPolicy", *PROBES}
"""What is done for a container from outside of it, here by `machine.Machine`."""


class NotPlayable(Exception):
    """A manifest asks for something that is not done here; says what and where."""


@contextmanager
def accepted(name: str) -> Iterator[None]:
    """What fails in the block over what a manifest holds is NotPlayable, of the object of that name."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise NotPlayable(f"{name} is none that Kubernetes would take: {error!r}") from error


@dataclass(frozen=True)
class Pod:
    """One pod as its controller makes it.

    Attributes:
        name: its own.
        owner: what replaces it, as "Job/NAME"; "" for a pod that nothing replaces.
        index: which of its owner's pods it is.
        metadata, spec: as in Kubernetes, volumes of claims included.
        aliases: names under which headless Services let others find it.
    """

    name: str
    owner: str
    index: int
    metadata: Manifest
    spec: Manifest
    aliases: tuple[str, ...] = ()

    @property
    def container(self) -> dict[str, Any]:
        """The one that it has."""
        return dict(self.spec["containers"][0])

    @property
    def labels(self) -> Mapping[str, str]:
        """Those that selectors go by."""
        return dict(self.metadata.get("labels", {}))

    @property
    def always(self) -> bool:
        """Whether its container is started again however it ends."""
        return bool(self.spec.get("restartPolicy", "Always") == "Always")

    @property
    def grace_s(self) -> float:
        """How long it may take to end, `on_duty_s` included."""
        return float(self.spec.get("terminationGracePeriodSeconds", SECONDS_OF_GRACE))

    @property
    def on_duty_s(self) -> float:
        """How long it serves on once its end is decided, before it is told."""
        before = self.container.get("lifecycle", {}).get("preStop", {})
        return float(before.get("sleep", {}).get("seconds", 0))

    @property
    def sidecars(self) -> list[dict[str, Any]]:
        """Containers that start before its own, and end after it."""
        return list(self.spec.get("initContainers", []))

    def environment(self, container: Manifest) -> dict[str, str]:
        """What a container of it finds there, fields of the pod worked out.

        Raises:
            NotPlayable: a value comes from elsewhere.
        """
        given: dict[str, str] = {}
        for each in container.get("env", []):
            given[each["name"]] = _expanded(self._value(each), given)
        return given

    def _value(self, variable: Manifest) -> str:
        if "valueFrom" not in variable:
            return str(variable.get("value", ""))
        path = variable["valueFrom"].get("fieldRef", {}).get("fieldPath", "")
        if path == "metadata.name":
            return self.name
        found = _FIELD.fullmatch(path)
        if found is None or found[2] not in self.metadata.get(found[1], {}):
            raise NotPlayable(
                f"pod {self.name}: no value for the variable {variable['name']}; it is no label"
            )
        return str(self.metadata[found[1]][found[2]])


@dataclass(frozen=True)
class Release:
    """All manifests of one rendered chart, and of the secrets that it needs."""

    manifests: tuple[Manifest, ...]

    def of(self, kind: str) -> list[Manifest]:
        """The manifests of a kind."""
        return [each for each in self.manifests if each["kind"] == kind]

    def named(self, kind: str, name: str) -> Manifest:
        """One manifest; raises NotPlayable where it is not there."""
        for each in self.of(kind):
            if each["metadata"]["name"] == name:
                return each
        raise NotPlayable(f"the {kind} {name} is in none of the files that were given")

    def pods(self) -> list[Pod]:
        """All pods that controllers would make at first, and those that stand alone; hooks of helm apart.

        Raises:
            NotPlayable: a workload asks for something that is not done here.
        """
        return [pod for each in self.manifests if HOOK not in _annotations(each) for pod in self._made(each)]

    def tests(self) -> list[Pod]:
        """The pods that `helm test` would start."""
        return [
            pod
            for each in self.manifests
            if _annotations(each).get(HOOK) == "test"
            for pod in self._made(each)
        ]

    def _made(self, manifest: Manifest) -> Iterator[Pod]:
        make = _CONTROLLERS.get(manifest["kind"])
        with accepted(f"{manifest['kind']} {manifest['metadata']['name']}"):
            for pod in make(manifest) if make else ():
                _check(pod)
                yield Pod(**{**vars(pod), "aliases": tuple(self._aliases(pod))})

    def _aliases(self, pod: Pod) -> Iterator[str]:
        """Names that headless Services give it: theirs, and in a StatefulSet its own in front of that."""
        for service in self.of("Service"):
            name, spec = service["metadata"]["name"], service["spec"]
            if spec.get("clusterIP") == "None" and spec["selector"].items() <= pod.labels.items():
                yield name
                if pod.spec.get("subdomain") == name:
                    yield f"{pod.spec['hostname']}.{name}"


@dataclass(frozen=True)
class Files:
    """What a volume of Secrets or ConfigMaps holds, by path, and how it may be opened."""

    contents: Mapping[str, bytes]
    mode: int = 0o644


def files_of(volume: Manifest, release: Release) -> Files | None:
    """The files of a volume; None for one that podman mounts by itself: empty, of a claim, of this machine.

    Raises:
        NotPlayable: a volume of another kind, or of a Secret or ConfigMap that is not there.
    """
    if {"emptyDir", "hostPath", "persistentVolumeClaim"} & set(volume):
        return None
    for kind in ("secret", "configMap", "projected"):
        if kind in volume:
            source = volume[kind]
            parts = source["sources"] if kind == "projected" else [{kind: source}]
            contents = {path: data for part in parts for path, data in _contents(part, release)}
            return Files(contents, source.get("defaultMode", Files.mode))
    raise NotPlayable(f"volume {volume['name']} is of a kind that is not made here")


def _contents(part: Manifest, release: Release) -> Iterator[tuple[str, bytes]]:
    ((kind, source),) = part.items()
    if kind == "secret":
        manifest = release.named("Secret", source.get("secretName") or source["name"])
        data = {key: base64.b64decode(text) for key, text in manifest.get("data", {}).items()}
        data |= {key: text.encode() for key, text in manifest.get("stringData", {}).items()}
    elif kind == "configMap":
        found = release.named("ConfigMap", source["name"])
        data = {key: text.encode() for key, text in found.get("data", {}).items()}
    else:
        raise NotPlayable(f"a projected volume of {kind} is not made here")
    items = source.get("items") or [{"key": key, "path": key} for key in data]
    for item in items:
        if item["key"] not in data:
            raise NotPlayable(f"{kind} {source}: it has no key {item['key']}")
        yield item["path"], data[item["key"]]


def playable(pod: Pod, folders: Mapping[str, Path]) -> dict[str, Any]:
    """The manifest that podman plays: the pod without what is done for it from outside.

    `folders` are where volumes of files lie on this machine, by the volume's name. Sidecars are containers
    like any other, before the pod's own, and none is started again by podman.
    """
    declared = {each["name"]: each for each in pod.spec.get("volumes", [])}
    volumes: dict[str, Manifest] = {}
    containers = []
    for container in (*pod.sidecars, pod.container):
        environment = pod.environment(container)
        mounted = [
            _mounted(pod, mount, declared, folders=folders, environment=environment)
            for mount in container.get("volumeMounts", [])
        ]
        volumes |= {volume["name"]: volume for _, volume in mounted}
        words = {key: container[key] for key in ("command", "args") if key in container}
        played = {key: value for key, value in container.items() if key not in _NOT_PODMANS}
        played |= {key: [_expanded(each, environment) for each in given] for key, given in words.items()}
        played["env"] = [{"name": name, "value": value} for name, value in environment.items()]
        containers.append({**played, "volumeMounts": [mount for mount, _ in mounted]})
    spec = {key: value for key, value in pod.spec.items() if key != "initContainers"}
    spec |= {"volumes": list(volumes.values()), "restartPolicy": "Never", "containers": containers}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**pod.metadata, "name": pod.name}, "spec": spec}


def _mounted(
    pod: Pod,
    mount: Manifest,
    declared: Mapping[str, Manifest],
    *,
    folders: Mapping[str, Path],
    environment: Mapping[str, str],
) -> tuple[Manifest, Manifest]:
    """A mount, and its volume, as podman knows them.

    Podman keeps an empty volume under its name, whichever pod it is of, so here the pod's name stands before
    it. Of a volume of files each part that is mounted is a volume.
    """
    name = mount["name"]
    if name not in folders:
        own = f"{pod.name}-{name}"
        return {**mount, "name": own}, {**declared[name], "name": own}
    part = _expanded(mount.get("subPathExpr", mount.get("subPath", "")), environment)
    own = f"{pod.name}-{name}-{part.replace('/', '-')}".rstrip("-")
    volume = {"name": own, "hostPath": {"path": str((folders[name] / part).resolve())}}
    return {"name": own, "mountPath": mount["mountPath"], "readOnly": True}, volume


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """A text in which each $(NAME) that is known is what it says, as in Kubernetes."""
    return _VARIABLE.sub(lambda found: environment.get(found[1], found[0]), text)


def _annotations(manifest: Manifest) -> Mapping[str, str]:
    return dict(manifest["metadata"].get("annotations") or {})


def _check(pod: Pod) -> None:
    """Raises NotPlayable for what a pod must not ask for here."""
    if len(pod.spec["containers"]) != 1:
        raise NotPlayable(
            f"pod {pod.name} has more than one container beside its sidecars, and this plays one"
        )
    for sidecar in pod.sidecars:
        probe = sidecar.get("startupProbe", {})
        if sidecar.get("restartPolicy") != "Always" or (probe and "exec" not in probe):
            asked = "a sidecar that stays, whose start, if any, is probed by exec"
            raise NotPlayable(f"pod {pod.name}: its init container {sidecar['name']} is not {asked}")
    for kind in PROBES:
        if kind in pod.container and "httpGet" not in pod.container[kind]:
            raise NotPlayable(f"pod {pod.name}: its {kind} is no httpGet, and no other kind is asked here")


def _alone(manifest: Manifest) -> Iterator[Pod]:
    yield Pod(manifest["metadata"]["name"], "", 0, manifest["metadata"], manifest["spec"])


def _stateful(manifest: Manifest) -> Iterator[Pod]:
    name, of = manifest["metadata"]["name"], manifest["spec"]
    _require_whole(of, "replicas", f"StatefulSet {name}")
    for index in range(of.get("replicas", 1)):
        own, metadata, spec = _template(manifest, f"{name}-{index}")
        metadata["labels"] |= {"statefulset.kubernetes.io/pod-name": own, POD_INDEX: str(index)}
        spec |= {"hostname": own, "subdomain": of["serviceName"]}
        claims = [each["metadata"]["name"] for each in of.get("volumeClaimTemplates", [])]
        spec["volumes"] = spec.get("volumes", []) + [
            {"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{own}"}} for claim in claims
        ]
        yield Pod(own, f"StatefulSet/{name}", index, metadata, spec)


def _indexed(manifest: Manifest) -> Iterator[Pod]:
    name, of = manifest["metadata"]["name"], manifest["spec"]
    if of.get("completionMode") != "Indexed":
        raise NotPlayable(f"Job {name} is not Indexed, and no other kind is made here")
    for key in ("completions", "parallelism", "backoffLimitPerIndex"):
        _require_whole(of, key, f"Job {name}")
    for index in range(of["completions"]):
        own, metadata, spec = _template(manifest, f"{name}-{index}")
        metadata["labels"] |= {"batch.kubernetes.io/job-name": name, JOB_INDEX: str(index)}
        metadata["annotations"] |= {JOB_INDEX: str(index)}
        spec["hostname"] = own
        variable = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
        spec["containers"][0]["env"] = [*spec["containers"][0].get("env", []), variable]
        yield Pod(own, f"Job/{name}", index, metadata, spec)


def _deployed(manifest: Manifest) -> Iterator[Pod]:
    name = manifest["metadata"]["name"]
    _require_whole(manifest["spec"], "replicas", f"Deployment {name}")
    for index in range(manifest["spec"].get("replicas", 1)):
        own, metadata, spec = _template(manifest, f"{name}-{index}")
        yield Pod(own, f"Deployment/{name}", index, metadata, spec)


def _require_whole(spec: Manifest, key: str, name: str) -> None:
    """Raises NotPlayable where a field is there that is no number of things."""
    if key in spec and (type(spec[key]) is not int or spec[key] < 0):
        raise NotPlayable(f"{name}: its {key} is {spec[key]!r}, and has to be a whole number")


def _template(manifest: Manifest, name: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A pod's name, and metadata and spec of its own."""
    template = deepcopy(manifest["spec"]["template"])
    metadata = {"labels": {}, "annotations": {}, **template["metadata"]}
    return name, metadata, template["spec"]


_CONTROLLERS: Final[Mapping[str, Callable[[Manifest], Iterable[Pod]]]] = {
    "Pod": _alone,
    "StatefulSet": _stateful,
    "Job": _indexed,
    "Deployment": _deployed,
}
