"""Refusals of settings."""

import pytest

from dase_grpc.config.resolve import RunConfig, parse_assignments, resolve
from dase_grpc.errors import ConfigError


def setting(assignment: str, **more: object) -> RunConfig:
    return resolve(more, parse_assignments([assignment]))


def refusal_of(*assignments: str) -> ConfigError:
    with pytest.raises(ConfigError) as refusal:
        resolve(parse_assignments(assignments))
    return refusal.value
