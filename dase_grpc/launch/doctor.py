"""`dase doctor`: what this machine can do and what will fail on it, each finding with its remedy."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.text import Text

from dase_grpc.launch.console import STYLES, Verdict, plain_table
from dase_grpc.launch.room import free_disk, free_memory, nearest_folder, shown_size
from dase_grpc.process.ends import MORE_FILES, too_few_files

PACKAGE: Final = "dase-grpc"
SHARED_MEMORY: Final = Path("/dev/shm")
ASKED_S: Final = 60.0
"""How long another program may take to answer."""
SKEW_S: Final = 2.0
"""By so much the clock of a file system may differ from this machine's."""
MANY_FILES: Final = 1024
RUN_BYTES: Final = 256 * 2**20
EXTRAS: Final = {
    "box2d": (["Box2D"], "Box2D's environments"),
    "certs": (["cryptography"], "`dase certs`"),
    "export": (["onnx", "onnxruntime"], "ONNX"),
    "kubernetes": (["yaml"], "`dase experiment --on kubernetes`"),
    "slurm": (["submitit"], "`dase experiment --on slurm`"),
    "tensorboard": (["tensorboard"], "TensorBoard's files"),
    "video": (["imageio", "imageio_ffmpeg"], "--video"),
}
"""Modules that each of the package's extras brings, and what they are for."""
PROXIES: Final = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")

_GL: Final = "import mujoco; context = mujoco.GLContext(8, 8); context.make_current(); context.free()"


@dataclass(frozen=True)
class Symptom:
    """One thing that was looked at; the remedy is empty where there is nothing to do."""

    subject: str
    found: str
    verdict: Verdict = "good"
    remedy: str = ""


def examine(runs: Path, environ: Mapping[str, str] = os.environ) -> list[Symptom]:
    """Looks at this machine; `runs` is where runs are to be kept. Takes seconds, and changes nothing."""
    looks: list[Callable[[], Iterable[Symptom]]] = [
        python,
        packages,
        extras,
        lambda: cores(environ),
        gpus,
        lambda: rendering(environ),
        memory,
        lambda: disk(runs),
        open_files,
        lambda: proxies(environ),
        lambda: writing(runs),
    ]
    return [finding for look in looks for finding in look()]


def doctor_here(runs: Path, console: Console, *, as_json: bool) -> int:
    """Prints what was found as a table or as JSON; 1 where something will fail, else 0."""
    found = examine(runs)
    if as_json:
        console.print_json(json.dumps([asdict(each) for each in found]))
    else:
        rows = ((Text(each.subject, STYLES[each.verdict]), each.found, each.remedy) for each in found)
        console.print(plain_table("", "found", "what to do", rows=rows))
    return int(any(each.verdict == "bad" for each in found))


def python() -> Iterator[Symptom]:
    """The interpreter against the versions that the package supports."""
    wanted = SpecifierSet(str(importlib.metadata.metadata(PACKAGE)["Requires-Python"]))
    fits = Version(platform.python_version()) in wanted
    remedy = "" if fits else f"install Python {wanted}"
    yield Symptom("Python", f"{platform.python_version()} on {platform.platform()}", _good(fits), remedy)


def packages(
    required: Iterable[str] | None = None, installed: Callable[[str], str] = importlib.metadata.version
) -> Iterator[Symptom]:
    """Each library that the package needs against the versions it supports."""
    names = importlib.metadata.requires(PACKAGE) if required is None else required
    for requirement in map(Requirement, names or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            version = installed(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Symptom(requirement.name, "is not installed", "bad", f'pip install "{wanted}"')
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        yield Symptom(requirement.name, version, _good(fits), "" if fits else f'pip install "{wanted}"')


def extras(find: Callable[[str], object] = importlib.util.find_spec) -> Iterator[Symptom]:
    """Which of the package's extras are installed, and what the others would be for."""
    lacking = [extra for extra, (modules, _) in EXTRAS.items() if not all(map(find, modules))]
    there = ", ".join(extra for extra in EXTRAS if extra not in lacking) or "none"
    remedy = "; ".join(f"for {EXTRAS[extra][1]} pip install '{PACKAGE}[{extra}]'" for extra in lacking)
    yield Symptom("extras", there, "note" if lacking else "good", remedy)


def cores(environ: Mapping[str, str]) -> Iterator[Symptom]:
    """The cores that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = environ.get("OMP_NUM_THREADS")
    told = f", OMP_NUM_THREADS = {threads}" if threads else ""
    few = usable < 2
    remedy = "two agents and a replay share one core: --lockstep costs less there" if few else ""
    yield Symptom("cores", f"{usable}{told}", "note" if few else "good", remedy)


def gpus() -> Iterator[Symptom]:
    """What torch sees of GPUs, and what the driver does."""
    from dase_grpc.learning.agents.device import gpu_names  # torch takes seconds to import

    yield gpu(gpu_names(), _driver())


def gpu(names: Sequence[str], driver: str | None) -> Symptom:
    """What there is to say of the GPUs that torch sees, and of the driver's version, None without one."""
    if names:
        numbered = ", ".join(f"{index}: {name}" for index, name in enumerate(names))
        return Symptom("GPU", f"{numbered}; driver {driver or 'not known'}")
    if driver is None:
        return Symptom("GPU", "none; agents train on the CPU")
    what = f"driver {driver}, but torch {importlib.metadata.version('torch')} sees no GPU"
    return Symptom("GPU", what, "note", "install a torch that is made for CUDA, or a newer driver")


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    asked = _answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return asked.splitlines()[0].strip() if asked else None


def rendering(environ: Mapping[str, str]) -> Iterator[Symptom]:
    """Whether MuJoCo can draw, as `dase evaluate --video` has it do."""
    from dase_grpc.launch.films import INSTALL_GL, choose_mujoco_backend

    chosen = dict(environ)
    choose_mujoco_backend(chosen)
    backend = chosen.get("MUJOCO_GL", "the display's")
    draws = _answer([sys.executable, "-c", _GL], env=chosen) is not None
    what = f"MuJoCo {'draws' if draws else 'cannot draw'} with {backend}"
    yield Symptom("films", what, "good" if draws else "note", "" if draws else f"for --video {INSTALL_GL}")


def memory() -> Iterator[Symptom]:
    """Free memory and shared memory."""
    yield Symptom("memory", f"{shown_size(free_memory())} available")
    if SHARED_MEMORY.is_dir():
        free = free_disk(SHARED_MEMORY)
        low = free < 64 * 2**20
        remedy = "give the container more, as with --shm-size" if low else ""
        yield Symptom("shared memory", f"{shown_size(free)} free", "note" if low else "good", remedy)


def disk(runs: Path) -> Iterator[Symptom]:
    """Free disk, against what a run with a million transitions of HalfCheetah keeps there."""
    free = free_disk(runs)
    short = free < RUN_BYTES
    remedy = "free space, or give --set replay.storage=memory" if short else ""
    yield Symptom(
        "disk", f"{shown_size(free)} free in {runs.absolute()}", "note" if short else "good", remedy
    )


def open_files() -> Iterator[Symptom]:
    """How many files a process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = too_few_files() is not None
    verdict: Verdict = "bad" if few else "note" if 0 <= limit < MANY_FILES else "good"
    told = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
    yield Symptom("open files", told, verdict, "" if verdict == "good" else MORE_FILES)


def proxies(environ: Mapping[str, str]) -> Iterator[Symptom]:
    """Proxies in the environment, which nodes do not go through."""
    given = [name for name in environ if name.lower() in PROXIES and environ[name]]
    if given:
        what = f"{', '.join(sorted(given))}; nodes connect directly"
        remedy = "where the replay can be reached through a proxy only, forward a port to it"
        yield Symptom("proxies", what, "note", remedy)
    else:
        yield Symptom("proxies", "none")


def writing(runs: Path) -> Iterator[Symptom]:
    """Whether runs can be written, and whether their disk has this machine's time."""
    existing = nearest_folder(runs)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0")
            file.flush()
            skew = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError as error:
        yield Symptom("runs", f"{existing}: {error.strerror}", "bad", "choose another folder with --runs")
        return
    yield Symptom("runs", f"{existing} can be written")
    off = abs(skew) > SKEW_S
    remedy = "synchronise both clocks, as by NTP" if off else ""
    yield Symptom(
        "clock",
        f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, the disk's {round(skew, 1) + 0.0:+.1f} s",
        "note" if off else "good",
        remedy,
    )


def _good(fits: bool) -> Verdict:
    return "good" if fits else "bad"


def _answer(command: list[str], env: Mapping[str, str] | None = None) -> str | None:
    """What a program prints; None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASKED_S, check=True, env=env)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
