"""The containment of an environment: its changes to the process hold in its own calls only."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Literal, Self

from dase_grpc.process.settings import FOLDER, PUT_BACK, UNKNOWN, Setting, settings
from dase_grpc.process.signals import is_ours

MEANT_FOR_OTHERS = (StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt)

_NAMES: Final = ("INT", "TERM", "HUP", "QUIT", "CHLD", "PIPE", "TSTP", "CONT", "WINCH")
OUR_SIGNALS: Final = tuple(getattr(signal, f"SIG{name}") for name in _NAMES if hasattr(signal, f"SIG{name}"))
"""What tells a process to end, pause or go on, and what its own machinery lives on.

Others, such as the alarm that an environment has set for itself, keep its handlers.
"""

STANDARD_STREAMS: Final = (0, 1, 2)

_changed_variables: Final[dict[str, tuple[str | None, str | None]]] = {}
"""What was given, and what an environment has left; None is without."""

State = dict[str, Any]
"""Values of settings by name."""

Kind = Literal["import", "make", "call"]


class Contained:
    """A block whose StopIteration, SystemExit and the like leave it as a RuntimeError.

    A loop, a future or the interpreter would take an environment's for its own end, with exit code 0.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, MEANT_FOR_OTHERS):
            raise RuntimeError(f"the environment or the agent raised {kind.__name__}({error})") from error


@contextmanager
def process_kept() -> Iterator[list[str]]:
    """For an import, for making and closing an environment: the process afterwards is as it was before.

    Gives a list in which stands after the block what was put back, but for handlers, which only the main
    thread can set, and streams. What an environment may rely on later it finds again in its calls
    (`Surroundings`). The process's variables stay as it left them, for libraries look at them at any time;
    `given_variables` are those from before.
    """
    variables = os.environ.copy()
    try:
        with _put_back(PUT_BACK) as changed, _handlers_and_streams_kept():
            yield changed
    finally:
        _note_variables(variables)


@contextmanager
def _put_back(known: Mapping[str, Setting]) -> Iterator[list[str]]:
    """Puts back what has changed of these settings; gives the list of it, as `process_kept` does.

    One after the other: to put one back may change what another is (settings.py).
    """
    changed: list[str] = []
    before = {name: setting.read() for name, setting in known.items()}
    try:
        yield changed
    finally:
        for name, value in before.items():
            if known[name].read() != value:
                known[name].write(value)
                changed.append(name)


@contextmanager
def kept_call(kind: Kind = "call") -> Iterator[list[str]]:
    """`process_kept` for a call of an environment's code, which finds there what it has changed before."""
    with process_kept() as changed, SURROUNDINGS.entered(kind):
        yield changed


@contextmanager
def left_as_found() -> Iterator[None]:
    """For a whole run: what was changed in the midst of it and not noticed then is put back at its end."""
    with _put_back(settings()), process_kept():
        yield


def given_variables() -> dict[str, str]:
    """The variables that were given to this process: without what environments have made of them."""
    variables = dict(os.environ)
    for name, (given, left) in _changed_variables.items():
        if variables.get(name) == left:  # else somebody has set it since
            variables.pop(name, None)
            if given is not None:
                variables[name] = given
    return variables


def _note_variables(before: Mapping[str, str]) -> None:
    after = os.environ.copy()
    for name in {*before, *after}:
        if before.get(name) != after.get(name):
            given, left = _changed_variables.get(name, (None, None))
            if before.get(name) != left:  # it was given anew
                given = before.get(name)
            _changed_variables[name] = given, after.get(name)


@contextmanager
def _handlers_and_streams_kept() -> Iterator[None]:
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in OUR_SIGNALS} if in_main else {}
    copies = dict(_copies())
    try:
        yield
    finally:
        for number, handler in handlers.items():
            now = signal.getsignal(number)
            if handler is not None and now is not handler and not is_ours(handler, now):
                signal.signal(number, handler)
        for stream, copy in copies.items():
            if not _is_open(stream):
                os.dup2(copy, stream)
            os.close(copy)


def _copies() -> Iterator[tuple[int, int]]:
    for stream in STANDARD_STREAMS:
        with suppress(OSError):  # it was closed before
            yield stream, os.dup(stream)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


class Surroundings:
    """The settings that an environment has changed: it finds them at its next call, and nobody else does.

    Simulators rely on what they set: on torch's default dtype, on the folder they have changed into. All
    environments of a process share this, but each is made in the folder in which importing its module has
    left the process. For one thread at a time; a call within a call changes nothing.

    Attributes:
        theirs: what is otherwise in calls.
    """

    def __init__(self) -> None:
        self.theirs: State = {}
        self._made_in: State = {}
        self._inside: set[int] = set()

    @contextmanager
    def entered(self, kind: Kind = "call") -> Iterator[None]:
        """For an import of an environment's module, its making, or any other call."""
        if kind == "make" and threading.get_ident() not in self._inside:
            self.theirs.pop(FOLDER, None)
            self.theirs.update(self._made_in)
        with self._settings_of_theirs(whole=True):
            yield
        if kind == "import":
            self._made_in = {name: value for name, value in self.theirs.items() if name == FOLDER}

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """For a call after which only what was changed before is looked at."""
        with self._settings_of_theirs(whole=False):
            yield

    @contextmanager
    def _settings_of_theirs(self, *, whole: bool) -> Iterator[None]:
        thread = threading.get_ident()
        if thread in self._inside:
            yield
            return
        self._inside.add(thread)
        ours: State = {}
        try:
            known = settings()
            ours = {name: known[name].read() for name in (known if whole else self.theirs)}
            for name in known:
                if name in self.theirs and self.theirs[name] != ours[name]:
                    known[name].write(self.theirs[name])
            yield
        finally:
            if whole:
                known = settings()
                ours = {name: ours.get(name, setting.initial) for name, setting in known.items()}
            try:
                self._leave(known, ours)
            finally:
                self._inside.discard(thread)

    def _leave(self, known: Mapping[str, Setting], ours: State) -> None:
        left = {name: known[name].read() for name, before in ours.items() if before is not UNKNOWN}
        for name, value in left.items():
            if value == ours[name]:
                self.theirs.pop(name, None)
            else:
                self.theirs[name] = value
                known[name].write(ours[name])


SURROUNDINGS: Final = Surroundings()
"""Those of this process."""
