"""Shard: the part of a sharded replay that a service is."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Self

from dase_grpc.errors import ConfigError

MAX_SHARDS: Final = 256

_FORM: Final = re.compile(r"([0-9]{1,3})/([0-9]{1,3})")


@dataclass(frozen=True)
class Shard:
    """One of `count` services that hold a run's transitions together; `index` counts from 0."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads INDEX/COUNT."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"--shard {text[:20]!r} is not of the form INDEX/COUNT; write 0/2 for the first of two shards"
            )
        index, count = (int(number) for number in match.groups())
        if not 1 <= count <= MAX_SHARDS:
            raise ConfigError(f"--shard {text} is one of {count} shards; a replay has 1 to {MAX_SHARDS}")
        if index >= count:
            raise ConfigError(
                f"--shard {text} does not exist; the shards of {count} are 0/{count} to {count - 1}/{count}"
            )
        return cls(index, count)


WHOLE: Final = Shard()
"""A replay in one piece."""


def missing(shards: Collection[Shard]) -> str | None:
    """Which shards of a replay are not among these, in a few words; None if none is missing."""
    counts = {shard.count for shard in shards}
    absent = sorted({(index, count) for count in counts for index in range(count)} - {*map(_pair, shards)})
    if not absent:
        return None
    named = ", ".join(f"{index}/{count}" for index, count in absent[:8])
    return f"shard{'s' if len(absent) > 1 else ''} {named}{', ...' if len(absent) > 8 else ''}"


def _pair(shard: Shard) -> tuple[int, int]:
    return shard.index, shard.count
