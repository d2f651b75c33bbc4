"""Releases that tests have played: a rendered chart with the Secrets and lists that its pods mount."""

import base64

from deploy.charts import Rendered
from pods.translation import Pod, Release

TLS = {key: base64.b64encode(key.encode()).decode() for key in ("ca.crt", "tls.crt", "tls.key")}


def secret(name: str) -> dict[str, object]:
    """A node's Secret, of nothing that anybody would trust."""
    return {"kind": "Secret", "metadata": {"name": f"dase-tls-{name}"}, "data": TLS}


def release(rendered: Rendered) -> Release:
    """The chart with all that its pods mount."""
    nodes = (
        "replay",
        "evaluator",
        *(f"{role}-{agent}" for role in ("learner", "actor") for agent in range(4)),
    )
    lists = {"kind": "ConfigMap", "metadata": {"name": "withdrawn"}, "data": {"ca.crl": ""}}
    return Release((*rendered.manifests, *map(secret, nodes), lists))


def named(made: Release, name: str) -> Pod:
    """The one pod of which this is a part of the name."""
    (pod,) = (each for each in made.pods() if name in each.name)
    return pod
