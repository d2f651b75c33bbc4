"""Writes deploy/image/*.txt: the version of every package in the images, so that builds repeat.

Resolves with this interpreter's pip (25.1 or newer) and the indexes it is configured for, and installs
nothing. Packages that torch itself pins to one version (NVIDIA's libraries, Triton) are left out: images for
CPU and CUDA share the pins. Run it under the Python of the images (3.11) after changing a dependency, then
look at the difference:

    python scripts/write_image_pins.py [FOLDER]
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = PROJECT / "deploy" / "image"
EXTRAS: Final = "box2d,certs,tensorboard"
WANTED: Final[dict[str, Sequence[str]]] = {
    "build.txt": ("pip>=25.1", "setuptools>=77"),
    "replay.txt": ("--group", f"{PROJECT / 'pyproject.toml'}:replay"),
    "full.txt": (f"{PROJECT}[{EXTRAS}]",),
}
"""What each file pins: the tools that build, the replay image, the image of every role."""

HEADER: Final = "# Made by scripts/write_image_pins.py; the Dockerfile installs it.\n"
PINNED_BY_TORCH: Final = ("nvidia-", "cuda-", "triton")


def main() -> None:
    """Writes the files into the folder given, else into deploy/image."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, wanted in WANTED.items():
        (folder / name).write_text(HEADER + "".join(f"{pin}\n" for pin in pins(wanted)), encoding="utf-8")


def pins(wanted: Sequence[str]) -> list[str]:
    """`name==version` of everything that pip would install, by name, without this project itself."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    made = subprocess.run([*command, "--report=-", *wanted], check=True, capture_output=True, text=True)
    found = {}
    for item in json.loads(made.stdout)["install"]:
        about = item["metadata"]
        found[about["name"].lower().replace("_", "-")] = about["version"].partition("+")[0]
    found.pop("dase-grpc", None)
    return [
        f"{name}=={version}"
        for name, version in sorted(found.items())
        if not name.startswith(PINNED_BY_TORCH)
    ]


if __name__ == "__main__":
    main()
