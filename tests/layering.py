"""Configurations as a command line puts them together."""

from dase_grpc.config import RunConfig
from dase_grpc.presets import layered


def layers(**given: object) -> RunConfig:
    nothing = {"preset_name": None, "file": None, "flags": {}, "assignments": []}
    return layered(**{**nothing, **given})
