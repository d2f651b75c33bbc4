"""What Prometheus' operator would make of the chart's PodMonitor, for a Prometheus without Kubernetes."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pods.machine import Life

FOUND = "pods.json"
PORT_NAME = "__meta_kubernetes_pod_container_port_name"
FIELDS = {"sourceLabels": "source_labels", "targetLabel": "target_label", "replacement": "replacement"}


def scrape_config(monitor: Mapping[str, Any]) -> str:
    """The configuration of a Prometheus that scrapes the pods in FOUND which the monitor selects."""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    selector = monitor["spec"]["selector"]
    wanted = {_label(name): value for name, value in selector["matchLabels"].items()}
    for each in selector["matchExpressions"]:
        assert each["operator"] == "In"
        wanted[_label(each["key"])] = "|".join(each["values"])
    wanted[PORT_NAME] = endpoint["port"]
    keep = [{"source_labels": [label], "regex": value, "action": "keep"} for label, value in wanted.items()]
    relabel = [{FIELDS[key]: value for key, value in each.items()} for each in endpoint["relabelings"]]
    job = {
        "job_name": monitor["metadata"]["name"],
        "file_sd_configs": [{"files": [FOUND], "refresh_interval": "1s"}],
        "relabel_configs": keep + relabel,
    }
    return yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]})


def write_found(folder: Path, lives: Iterable[Life]) -> None:
    """Every port of every pod with the labels by which Prometheus knows it in a cluster."""
    targets = [
        {
            "targets": [f"{life.address}:{port['containerPort']}"],
            "labels": {
                "__meta_kubernetes_pod_name": life.pod.name,
                PORT_NAME: port["name"],
                **{_label(name): value for name, value in life.pod.labels.items()},
            },
        }
        for life in lives
        for port in life.pod.container.get("ports", [])
    ]
    fresh = folder / f"{FOUND}.new"
    fresh.write_text(json.dumps(targets), encoding="utf-8")
    fresh.rename(folder / FOUND)


def _label(name: str) -> str:
    """The meta label in which a pod's label is found."""
    return "__meta_kubernetes_pod_label_" + "".join(each if each.isalnum() else "_" for each in name)
