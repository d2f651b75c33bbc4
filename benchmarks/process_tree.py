"""What a process and all that it has started use: memory and processor time, read from /proc (Linux).

A thread that is ready to run and gets no core waits in the kernel's queue, and the kernel counts for how
long. Without that wait a run takes about as long as on a machine with a free core for each thread.

Memory counts every page once. Anonymous pages (heaps, stacks, tensors, the replay's ring) belong to one
process each and are added up. Pages of mapped files (shared libraries, above all torch's) are shared by
all processes that map the same file, so the process that holds the most of them stands for all. The
proportional set size (PSS) of the kernel would divide them by the number of processes that map them
anywhere on the machine, other people's included, so its sum over a tree depends on who else runs torch;
it is kept for comparison.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

KIB = 1024


@dataclass(frozen=True)
class Memory:
    """Resident memory of one process, in bytes.

    Attributes:
        rss: all resident pages.
        pss: the same, shared pages divided by the number of processes that map them.
        own: anonymous pages; those that a fork shares are divided likewise.
        mapped: resident pages of files.
    """

    rss: int
    pss: int
    own: int
    mapped: int


def parse_rollup(text: str) -> Memory:
    """Reads what /proc/PID/smaps_rollup says.

    Raises:
        ValueError: a field is missing.
    """
    fields = {}
    for line in text.splitlines()[1:]:
        name, _, value = line.partition(":")
        amount, _, unit = value.strip().partition(" ")
        if unit == "kB":
            fields[name] = int(amount) * KIB
    try:
        rss, anonymous = fields["Rss"], fields["Anonymous"]
        return Memory(rss=rss, pss=fields["Pss"], own=fields["Pss_Anon"], mapped=rss - anonymous)
    except KeyError as missing:
        raise ValueError(f"smaps_rollup has no field {missing}; Linux 5.9 or newer is needed") from None


def read_memory(pid: int) -> Memory | None:
    """The memory of a process; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return parse_rollup(text) if text else None


def counted_once(memories: Iterable[Memory]) -> int:
    """The memory of several processes together, in bytes, each page counted once."""
    present = list(memories)
    return sum(each.own for each in present) + max((each.mapped for each in present), default=0)


def read_waits(pid: int) -> dict[int, float]:
    """Seconds that each thread of a process has been ready to run without a core; none if it has ended."""
    waits = {}
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        try:
            waits[int(folder.name)] = int((folder / "schedstat").read_text(encoding="ascii").split()[1]) / 1e9
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
    return waits


@dataclass(frozen=True)
class Sample:
    """One look at a tree.

    Attributes:
        at: when, by the clock of the tree.
        busy_s: processor seconds of the whole machine so far.
        cpu_s: processor seconds of each process so far, by name; of those that have ended as well.
        memory: of each process that runs, by name; empty where nobody looks at it.
        waited_s: of each process that runs, by name, and each of its threads, by id: how long it has been
            ready to run without a core.
    """

    at: float
    busy_s: float
    cpu_s: Mapping[str, float]
    memory: Mapping[str, Memory]
    waited_s: Mapping[str, Mapping[int, float]]


class ProcessTree:
    """Looks at a process and its descendants, however often.

    Args:
        pid: the root.
        clock: the time that samples carry.
        name: what to call a process with this command line; must be unique within the tree.
        memory: whether to look at memory, too; three milliseconds of the kernel's for each process.
    """

    def __init__(
        self,
        pid: int,
        *,
        clock: Callable[[], float],
        name: Callable[[Sequence[str]], str],
        memory: bool = True,
    ) -> None:
        self._root = psutil.Process(pid)
        self._clock = clock
        self._name = name
        self._looks_at_memory = memory
        self._cpu_s: dict[str, float] = {}

    def sample(self) -> Sample:
        """Looks at all processes of the tree; one that ends meanwhile is left out."""
        memory: dict[str, Memory] = {}
        waited_s: dict[str, dict[int, float]] = {}
        for process in self._running():
            try:
                times, name = process.cpu_times(), self._name(process.cmdline())
            except psutil.NoSuchProcess:  # a zombie is one too: it has no command line any more
                continue
            self._cpu_s[name] = times.user + times.system
            waited_s[name] = read_waits(process.pid)
            used = read_memory(process.pid) if self._looks_at_memory else None
            if used is not None:
                memory[name] = used
        machine = psutil.cpu_times()
        busy_s = machine.user + machine.nice + machine.system
        return Sample(self._clock(), busy_s, dict(self._cpu_s), memory, waited_s)

    def _running(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def cpu_s_between(samples: Sequence[Sample], process: str, begun_at: float, ended_at: float) -> float:
    """Processor seconds of a process between two moments; interpolated between samples."""
    return _growth([(each.at, each.cpu_s.get(process, 0.0)) for each in samples], begun_at, ended_at)


def busy_s_between(samples: Sequence[Sample], begun_at: float, ended_at: float) -> float:
    """Processor seconds of the whole machine between two moments; interpolated between samples."""
    return _growth([(each.at, each.busy_s) for each in samples], begun_at, ended_at)


def longest_wait_s(samples: Sequence[Sample], process: str, begun_at: float, ended_at: float) -> float:
    """How long, between two moments, the thread of a process that waited most for a core did so."""
    known: dict[int, list[tuple[float, float]]] = {}
    for sample in samples:
        for thread, waited_s in sample.waited_s.get(process, {}).items():
            known.setdefault(thread, []).append((sample.at, waited_s))
    return max((_growth(points, begun_at, ended_at) for points in known.values()), default=0.0)


def _growth(points: Sequence[tuple[float, float]], begun_at: float, ended_at: float) -> float:
    at, counted = [point[0] for point in points], [point[1] for point in points]
    return float(np.interp(ended_at, at, counted) - np.interp(begun_at, at, counted))


def peak(samples: Iterable[Sample]) -> Sample:
    """The sample with the most memory."""
    return max(samples, key=lambda sample: counted_once(sample.memory.values()))
