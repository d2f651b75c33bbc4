"""A film is there whole, or what was there before it is."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from contracts.sentences import refuses

from dase_grpc.errors import DiskFullError, RunDirectoryError
from dase_grpc.launch import films
from dase_grpc.launch.films import write_video

ENDINGS = (".mp4", ".gif")


@pytest.fixture(autouse=True)
def _ffmpeg() -> None:
    pytest.importorskip("imageio_ffmpeg")


def noise(count: int, *, side: int = 200) -> list[np.ndarray]:
    """Frames that no format makes small."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (side, side, 3)).astype(np.uint8) for _ in range(count)]


def fill(disk: Path, *, free: int) -> None:
    (disk / "other").write_bytes(bytes(max(0, os.statvfs(disk).f_bavail * 4096 - free)))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # where ffmpeg ends, imageio leaves its pipe open
@pytest.mark.parametrize("free", [0, 2**19])
@pytest.mark.parametrize("ending", ENDINGS)
def test_where_the_disk_has_no_room_the_older_film_stays_and_nothing_else_is_left(
    small_disk, capfd, ending, free
):
    film = small_disk / f"film{ending}"
    film.write_bytes(b"an older film")
    fill(small_disk, free=free)
    with refuses(DiskFullError, f"cannot write the video {film}: No space left on device; free space"):
        write_video(film, noise(40), fps=10)
    assert film.read_bytes() == b"an older film"
    assert {each.name for each in small_disk.iterdir()} == {film.name, "other"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_film_takes_the_place_of_an_older_one(tmp_path, ending):
    film = tmp_path / f"film{ending}"
    film.write_bytes(b"an older film")
    write_video(film, noise(3, side=16), fps=10)
    assert film.stat().st_size > 100
    assert list(tmp_path.iterdir()) == [film]


def test_a_film_that_ffmpeg_ends_too_early_is_refused(tmp_path, monkeypatch):
    imageio, ffmpeg = films._mp4_modules()
    short = SimpleNamespace(mimwrite=lambda path, frames, **more: imageio.mimwrite(path, frames[:7], **more))
    monkeypatch.setattr(films, "_mp4_modules", lambda: (short, ffmpeg))
    with refuses(RunDirectoryError, "film.mp4: ffmpeg has written 7 of 20 frames; see that it can be"):
        write_video(tmp_path / "film.mp4", noise(20, side=16), fps=10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fps", [1, 29.97, 60, 1_000])
def test_every_frame_counts_however_fast_they_follow_each_other(tmp_path, fps):
    write_video(tmp_path / "film.mp4", noise(9, side=16), fps=fps)
