"""Keeps what an environment raises from acting on the machinery around it."""

from types import TracebackType
from typing import Self

MEANT_FOR_OTHERS = (StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt)


class Contained:
    """A block whose StopIteration, SystemExit and the like leave it as a RuntimeError.

    Raised by an environment they are bugs like any other, but a loop, a generator, a future or the
    interpreter would take them for its own end: quietly, or with exit code 0.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, MEANT_FOR_OTHERS):
            raise RuntimeError(f"the environment or the agent raised {kind.__name__}({error})") from error
