"""Builds the images without a registry, and runs them as a cluster would: read-only, as nobody special."""

import fcntl
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from children import ran
from deploy.deployed import PROJECT

TOOLS = ("buildah", "mmdebstrap", "bwrap")
BASE = "docker.io/library/python:3.11-slim-bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
UID = "65532"
KEPT = 40
"""Images, those on the way included, above which the storage is begun anew: each build adds about ten."""

CONFIGURED = ("/etc/xdg/pip", "/etc/ssl/certs", "/opt/wheels", "/opt/pypi", "/opt/pypi-more")
"""Where this machine may keep packages and whom it trusts; the build sees those that are there."""


def missing_tools() -> list[str]:
    """What is not installed of what this needs."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


@dataclass(frozen=True)
class Builder:
    """buildah with a storage of its own in a folder, which tests share: what is there is not built again."""

    folder: Path

    @property
    def storage(self) -> tuple[str, ...]:
        """The options of buildah and podman that say where images are."""
        return (
            f"--root={self.folder / 'storage'}",
            f"--runroot={self.folder / 'run'}",
            "--storage-driver=overlay",
        )

    def buildah(self, *arguments: object, timeout_s: float = 900.0) -> str:
        """Runs buildah; returns what it printed."""
        command = ["buildah", *self.storage, *map(str, arguments)]
        isolated = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
        done = ran(*command, cwd=PROJECT, env=isolated, timeout=timeout_s)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout.strip()

    def build(self, target: str) -> str:
        """Builds a target of the project's Dockerfile as far as it has changed; returns the image's name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:  # tests run side by side
            fcntl.flock(lock, fcntl.LOCK_EX)
            if len(self.buildah("images", "--all", "--quiet").split()) > KEPT:
                ran("buildah", *self.storage, "rmi", "--all")  # but those that a container runs
            if BASE not in self.buildah("images", "--format={{.Name}}:{{.Tag}}").splitlines():
                self._make_base()
            return self._build(target)

    def _make_base(self) -> None:
        """A stand-in under the very name in the Dockerfile: Debian's Python instead of Docker's."""
        folder = self.folder / "base"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        debian = ["--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder / "base.tar")]
        subprocess.run(["mmdebstrap", "--quiet", *debian], check=True, timeout=600)
        (folder / "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["python3"]\n')
        self.buildah("bud", "--tag", BASE, folder)
        shutil.rmtree(folder)

    def _build(self, target: str) -> str:
        config = self.folder / "pip.conf"
        config.write_text(_pip_configuration())
        volumes = [f"--volume={path}:{path}:ro" for path in CONFIGURED if Path(path).exists()]
        self.buildah(
            *("bud", "--pull-never", "--network=host", "--layers", f"--target={target}"),
            f"--volume={config}:/etc/pip.conf:ro",
            *volumes,
            "--build-arg=TORCH_INDEX=https://pypi.org/simple",
            f"--tag=dase:{target}",
            ".",
        )
        return f"dase:{target}"

    def mounted(self, image: str) -> tuple[str, Path]:
        """A container of an image, and where its root file system lies."""
        container = self.buildah("from", "--pull-never", image)
        return container, Path(self.buildah("mount", container))


def sandboxed(root: Path, environment: dict[str, str], *command: str) -> list[str]:
    """The command line that runs a command in a root file system: read-only but for /tmp, without rights."""
    variables = [part for name, value in environment.items() for part in ("--setenv", name, value)]
    return [
        *("bwrap", "--ro-bind", str(root), "/", "--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev"),
        *("--unshare-user", "--uid", UID, "--gid", UID, "--unshare-pid", "--cap-drop", "ALL"),
        *("--die-with-parent", "--chdir", "/tmp", "--clearenv"),
        *variables,
        *command,
    ]


def _pip_configuration() -> str:
    """This machine's configuration of pip, wherever it comes from, as one file."""
    listed = ran("python3", "-m", "pip", "config", "list", check=True)
    values = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        values[name.rpartition(".")[2]] = value.strip("'")
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items())
