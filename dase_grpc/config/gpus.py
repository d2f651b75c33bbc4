"""The GPUs that the learners of one machine are put on, as `--gpu` and `gpu=` name them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from dase_grpc.config.texts import shown
from dase_grpc.errors import ConfigError

ALL: Final = "all"


@dataclass(frozen=True)
class Gpus:
    """CUDA device indices, each once, which learners take in turn; None for all that there are."""

    indices: tuple[int, ...] | None

    @classmethod
    def parse(cls, given: str | int | Iterable[int]) -> Self:
        """Reads "0", "0,1,2" or "all", an index or several. ConfigError where it is none of these."""
        if isinstance(given, str) and given == ALL:
            return cls(None)
        try:
            indices = tuple(int(str(each)) for each in _listed(given))
        except ValueError:
            indices = ()
        if not indices or min(indices) < 0:
            raise ConfigError(
                f"--gpu {shown(given)} names no GPUs; give indices from 0 on, as 0 or 0,1,2, or {ALL}"
            )
        if twice := [index for index in indices if indices.count(index) > 1]:
            raise ConfigError(f"--gpu {cls(indices)} names {twice[0]} more than once; give each GPU once")
        return cls(indices)

    def __str__(self) -> str:
        return ALL if self.indices is None else ",".join(map(str, self.indices))

    @property
    def only(self) -> int | None:
        """The index where one alone is named."""
        return self.indices[0] if self.indices is not None and len(self.indices) == 1 else None


def _listed(given: str | int | Iterable[int]) -> Iterable[object]:
    if isinstance(given, str):
        return given.split(",")
    try:
        return iter(given)  # type: ignore[arg-type]  # an index alone is none, and neither is NumPy's
    except TypeError:
        return [given]
