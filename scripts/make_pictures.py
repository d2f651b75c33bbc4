"""Makes docs/images/top.svg and docs/images/report.png: `python scripts/make_pictures.py [FOLDER]`.

Trains three agents for a minute, watches them as `dase top` does, and photographs the page that the run
writes. That takes Chromium (Debian: apt-get install chromium), for documents only; without one the page's
picture is left as it is.
"""

import asyncio
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import MONOKAI

from dase_grpc.observe.top import Screen, follow
from dase_grpc.observe.view import Target, observing

IMAGES: Final = Path(__file__).resolve().parents[1] / "docs" / "images"
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
SHOWN_REPLAY: Final = "127.0.0.1:50051"
WATCHED_S: Final = 45
RUN: Final = (
    *("--env=Pendulum-v1", "--agents=3", "--steps=6000", "--seed=1", "--name=pendulum"),
    *("--set=agent.start_steps=500", "--set=eval.every=500", "--set=eval.episodes=5"),
)
SIZE: Final = (110, 24)
PAGE: Final = (1120, 1500)


def main(folder: Path) -> None:
    """Trains, watches, draws."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        with training(Path(scratch)) as (run, replay):
            screen = asyncio.run(watched(replay))
            save_screen(replace(screen, replays=SHOWN_REPLAY), folder / "top.svg")
            run.send_signal(signal.SIGINT)
            run.communicate()
        photograph(Path(scratch) / "runs" / "pendulum" / "report.html", folder / "report.png")


@contextmanager
def training(scratch: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run that is killed if it has not ended by itself, and its replay's address."""
    command = [sys.executable, "-m", "dase_grpc", "train", *RUN]
    run = subprocess.Popen(command, cwd=scratch, stdout=subprocess.PIPE, text=True)
    try:
        yield run, next(address_in(run))
    finally:
        run.kill()
        run.wait()


def address_in(run: subprocess.Popen[str]) -> Iterator[str]:
    """The address that a run says one can watch it at."""
    for line in run.stdout or ():
        if found := re.search(r"dase top --replay (\S+)", line):
            yield found[1]
    raise SystemExit("the run ended before it could be watched")


async def watched(replay: str) -> Screen:
    """The last of the screens, counted from when all agents train."""
    screens: list[Screen] = []
    stop = asyncio.Event()

    def show(screen: Screen) -> None:
        cluster = screen.looks[-1].cluster
        trains = (
            cluster is not None and [agent.progress.state for agent in cluster.agents] == ["training"] * 3
        )
        if trains:
            screens.append(screen)
        if len(screens) >= WATCHED_S:
            stop.set()

    async with observing(Target.parse(replay=replay, tls=None, token_file=None, timeout_s=5.0)) as observer:
        await follow(observer.look, show, stop, replays=replay)
    return screens[-1]


def save_screen(screen: Screen, path: Path) -> None:
    """The screen as a terminal would show it."""
    console = Console(width=SIZE[0], height=SIZE[1], record=True, color_system="truecolor", quiet=False)
    console.file = Path("/dev/null").open("w", encoding="utf-8")  # noqa: SIM115 - recorded, not shown
    with console.file:
        console.print(screen)
        text = console.export_svg(title="dase top", theme=MONOKAI, unique_id="dase-top")
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL), encoding="utf-8")
    print(path)


def photograph(page: Path, path: Path) -> None:
    """The upper part of a page as a browser shows it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"{path} is left as it is: no Chromium (Debian: apt-get install chromium)")
        return
    width, height = PAGE
    command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
    command += [f"--window-size={width},{height}", f"--screenshot={path}", page.as_uri()]
    subprocess.run(command, check=True, timeout=60, stderr=subprocess.DEVNULL)
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
