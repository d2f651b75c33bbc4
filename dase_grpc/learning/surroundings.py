"""What environments have made of the settings of their process: theirs in calls into them, and only there."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from dase_grpc.process.settings import FOLDER, UNKNOWN, Setting, settings

State = dict[str, Any]
"""Values of settings by name."""


class Surroundings:
    """The settings that an environment has changed: it finds them at its next call, and nobody else does.

    Simulators rely on what they set: on torch's default dtype, on the folder they have changed into. So
    nothing is simply put back. All environments of a process share this, as they would in a program of their
    own, but each is made in the folder in which importing its module has left the process. For one thread at
    a time; a call within a call changes nothing.

    Attributes:
        theirs: what is otherwise in calls.
    """

    def __init__(self) -> None:
        self.theirs: State = {}
        self._made_in: State = {}
        self._inside: set[int] = set()

    @contextmanager
    def importing(self) -> Iterator[None]:
        """For the import of an environment's module."""
        with self.entered():
            yield
        self._made_in = {name: value for name, value in self.theirs.items() if name == FOLDER}

    @contextmanager
    def making(self) -> Iterator[None]:
        """For a call that makes an environment."""
        if threading.get_ident() not in self._inside:
            self.theirs.pop(FOLDER, None)
            self.theirs.update(self._made_in)
        with self.entered():
            yield

    @contextmanager
    def entered(self) -> Iterator[None]:
        """For any other call."""
        with self._settings_of_theirs(whole=True):
            yield

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
        known = settings()
        ours = {name: known[name].read() for name in (known if whole else self.theirs)}
        try:
            for name in known:
                if name in self.theirs and self.theirs[name] != ours[name]:
                    known[name].write(self.theirs[name])
            yield
        finally:
            if whole:
                known = settings()
                ours = {name: ours.get(name, setting.initial) for name, setting in known.items()}
            self._leave(known, ours)
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
