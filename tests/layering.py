"""Configurations as a command line puts them together."""

from dase_grpc.config.presets import layered
from dase_grpc.config.resolve import RunConfig


def layers(**given: object) -> RunConfig:
    nothing = {"preset_name": None, "file": None, "flags": {}, "assignments": []}
    return layered(**{**nothing, **given})
