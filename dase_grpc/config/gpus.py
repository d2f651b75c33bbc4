"""The GPUs that the learners of one machine are put on, as `--gpu` and `gpu=` name them."""

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from dase_grpc.errors import ConfigError

ALL: Final = "all"


@dataclass(frozen=True)
class Gpus:
    """CUDA device indices, each once, which learners take in turn; None for all that there are."""

    indices: tuple[int, ...] | None

    @classmethod
    def parse(cls, given: str | int | Iterable[int]) -> Self:
        """Reads "0", "0,1,2" or "all", an index or several. ConfigError where it is none of these."""
        if str(given) == ALL:
            return cls(None)
        listed = given.split(",") if isinstance(given, str) else given
        try:
            indices = tuple(int(str(each)) for each in (listed if isinstance(listed, Iterable) else [listed]))
        except ValueError:
            indices = ()
        if not indices or min(indices) < 0:
            shown = reprlib.repr(given)
            raise ConfigError(f"--gpu {shown} names no GPUs; give indices from 0 on, as 0 or 0,1,2, or {ALL}")
        if twice := [index for index in indices if indices.count(index) > 1]:
            raise ConfigError(f"--gpu {cls(indices)} names {twice[0]} more than once; give each GPU once")
        return cls(indices)

    def __str__(self) -> str:
        return ALL if self.indices is None else ",".join(map(str, self.indices))

    @property
    def only(self) -> int | None:
        """The index where one alone is named."""
        return self.indices[0] if self.indices is not None and len(self.indices) == 1 else None
