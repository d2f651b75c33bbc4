"""`dase doctor`: what is looked at, the verdicts, and the remedies."""

import importlib.metadata
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dase_grpc.cli.main import app
from dase_grpc.launch import doctor
from dase_grpc.launch.doctor import Symptom


def test_this_machine_can_train():
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = {each["subject"]: each for each in json.loads(done.output)}
    assert done.exit_code == 0, done.output
    assert {
        "Python",
        "torch",
        "grpcio",
        "cores",
        "GPU",
        "films",
        "memory",
        "disk",
        "open files",
    } <= found.keys()
    assert found["torch"]["found"] == importlib.metadata.version("torch")
    assert all(each["remedy"] for each in found.values() if each["verdict"] != "good")
    assert not Path("runs").exists()


def test_the_table_names_what_to_do(monkeypatch):
    bad = Symptom("disk", "none", "bad", "free space")
    monkeypatch.setattr(doctor, "examine", lambda runs: [Symptom("Python", "3.11"), bad])
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "free space" in done.output


def test_libraries_are_held_to_what_the_package_asks_for():
    def installed(name: str) -> str:
        if name == "absent":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"old": "1.0", "fine": "2.5"}[name]

    required = ["old>=2", "fine>=2,<3", "absent>=1", "extra>=1; extra == 'dev'"]
    found = list(doctor.packages(required, installed))
    assert found == [
        Symptom("old", "1.0", "bad", 'pip install "old>=2"'),
        Symptom("fine", "2.5"),
        Symptom("absent", "is not installed", "bad", 'pip install "absent>=1"'),
    ]


def test_extras_that_are_not_there_are_named_with_what_they_are_for():
    (found,) = doctor.extras(lambda module: None if module == "imageio_ffmpeg" else object())
    assert (found.found, found.verdict) == ("box2d, certs, export, kubernetes, slurm, tensorboard", "note")
    assert found.remedy == "for --video pip install 'dase-grpc[video]'"
    assert next(doctor.extras(lambda module: module)) == Symptom(
        "extras", "box2d, certs, export, kubernetes, slurm, tensorboard, video"
    )


@pytest.mark.parametrize(
    ("names", "driver", "verdict", "said"),
    [
        (["H200", "H200"], "570.1", "good", "0: H200, 1: H200; driver 570.1"),
        ([], None, "good", "none; agents train on the CPU"),
        ([], "570.1", "note", "sees no GPU"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_noted(names, driver, verdict, said):
    found = doctor.gpu(names, driver)
    assert found.verdict == verdict
    assert said in found.found


def test_proxies_are_named_without_their_values():
    (found,) = doctor.proxies({"HTTPS_PROXY": "http://user:secret@proxy", "no_proxy": "x"})
    assert (found.verdict, "HTTPS_PROXY" in found.found, "secret" in found.found) == ("note", True, False)
    assert next(iter(doctor.proxies({"http_proxy": ""}))).verdict == "good"


def test_a_folder_that_cannot_be_written_is_bad(tmp_path, monkeypatch):
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    (found,) = doctor.writing(tmp_path / "a" / "b")
    assert found == Symptom(
        "runs", f"{tmp_path}: Permission denied", "bad", "choose another folder with --runs"
    )


def test_one_core_is_noted(monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: {0})
    (found,) = doctor.cores({"OMP_NUM_THREADS": "4"})
    assert (found.verdict, found.found) == ("note", "1, OMP_NUM_THREADS = 4")
