"""The Indexed Job of an experiment: valid, without rights, each index a cell; and a fake kubectl."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
import yaml
from children import importing
from contracts.sentences import assert_one_sentence
from launch.experiment_cases import small_cells
from small import SETTINGS

from dase_grpc.errors import ConfigError, SchedulerError
from dase_grpc.launch import checks
from dase_grpc.launch.experiments import experiment
from dase_grpc.launch.experiments.experiment import ExperimentOptions, experiment_here
from dase_grpc.launch.experiments.kubernetes import LARGEST_BYTES, CellsJob, apply, yaml_text
from dase_grpc.launch.experiments.runner import STOP_CELL_S
from dase_grpc.launch.experiments.sites import KubernetesSite
from dase_grpc.launch.experiments.task import NOTHING_KEPT, STOPPED

POD = {"image": "registry.example/dase:0.2.0", "claim": "runs"}
TEXT = "# an experiment\n[matrix]\nseeds = 3\n"


def job_of(cells=None, *, name: str = "Small buffer", text: str = TEXT, **site) -> CellsJob:
    cells = cells or small_cells(seed=[0, 1, 2])
    return CellsJob(name, text, cells, KubernetesSite.model_validate(POD | site))


def spec_of(job: CellsJob) -> dict:
    return job.manifests()[1]["spec"]


def pod_of(job: CellsJob) -> dict:
    return spec_of(job)["template"]["spec"]


@pytest.mark.parametrize("version", ["1.31", "1.34", "1.36", "1.37"])
def test_the_manifests_are_valid(version):
    validate = pytest.importorskip("kubernetes_validate").validate
    for given in (
        {},
        {"gpus": 1, "node_selector": {"pool": "gpu"}, "cpus": 3, "namespace": "lab", "retries": 0},
    ):
        for manifest in yaml.safe_load_all(yaml_text(job_of(**given).manifests())):
            validate(manifest, version, strict=True)


def test_what_is_written_reads_as_what_is_meant():
    manifests = job_of(name="größe 1").manifests()
    text = yaml_text(manifests)
    assert list(yaml.safe_load_all(text)) == manifests
    assert "  experiment.toml: |\n    # an experiment\n    [matrix]\n" in text


def test_each_index_is_a_cell_and_so_many_run_at_once():
    job = job_of(at_once=2)
    config, _ = job.manifests()
    assert config["data"] == {"experiment.toml": TEXT, "cells": "seed-0\nseed-1\nseed-2\n"}
    spec = spec_of(job)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 2)
    assert spec_of(job_of(at_once=9))["parallelism"] == 3


def test_what_has_ended_goes_by_itself_or_by_the_label_that_the_page_names():
    config, job = job_of(name="Small buffer").manifests()
    days = job["spec"]["ttlSecondsAfterFinished"] / 86_400
    page = (Path(__file__).parents[3] / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert f"deletes a Job that has ended after {days:g} days" in page
    assert "kubectl delete configmaps -l dase/experiment=dase-NAME" in page
    for each in (config, job):
        assert each["metadata"]["labels"]["dase/experiment"] == "dase-small-buffer"


def test_stops_and_evictions_do_not_count_and_refusals_are_not_tried_again():
    spec = spec_of(job_of(retries=5))
    stopped, refused, evicted = spec["podFailurePolicy"]["rules"]
    assert (stopped["action"], stopped["onExitCodes"]["values"]) == ("Ignore", [NOTHING_KEPT, STOPPED])
    assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailIndex", [2])
    assert (evicted["action"], evicted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert {rule["onExitCodes"]["containerName"] for rule in (stopped, refused)} == {
        pod_of(job_of())["containers"][0]["name"]
    }
    assert (spec["backoffLimitPerIndex"], spec["podReplacementPolicy"]) == (5, "Failed")
    assert pod_of(job_of())["restartPolicy"] == "Never"


def test_pods_have_no_rights_a_place_to_write_and_time_to_end():
    pod = pod_of(job_of())
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    assert mounted["tmp"] == "/tmp"
    assert pod["terminationGracePeriodSeconds"] > STOP_CELL_S


def test_pods_are_given_what_the_file_asks_for():
    (container,) = pod_of(job_of(memory="1.5GiB", gpus=1, cpus=3, node_selector={"pool": "a"}))["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "3", "memory": "1536Mi"},
        "limits": {"memory": "1536Mi", "nvidia.com/gpu": 1},
    }
    assert container["args"][-1] == "--gpu=0"
    assert pod_of(job_of(node_selector={"pool": "a"}))["nodeSelector"] == {"pool": "a"}
    cluster = pod_of(job_of(small_cells(mode="cluster", train__agents=[1, 3]), gpus=2))["containers"][0]
    assert (cluster["resources"]["requests"]["cpu"], cluster["args"][-1]) == ("4", "--gpu=all")


def test_dase_understands_what_a_pod_is_told(tmp_path, monkeypatch):
    """The arguments of the pod of index 1, with its folders here, train that cell."""
    (tmp_path / "config").mkdir()
    file = tmp_path / "config" / "e.toml"
    file.write_text(tomli_w.dumps({"set": SETTINGS, "matrix": {"seed": [0, 1]}}))
    (tmp_path / "config" / "cells").write_text("seed-0\nseed-1\n")
    (container,) = pod_of(job_of(name="e"))["containers"]
    args = [
        arg.replace("/etc/dase", str(file.parent)).replace("/runs", str(tmp_path / "runs"))
        for arg in container["args"]
    ]
    args = [arg.replace("$(DASE_CELL)", "1") for arg in args]
    asked = []
    monkeypatch.setattr(experiment, "_run_one", lambda checked, cell: asked.append((checked, cell.name)) or 0)
    from dase_grpc.cli.main import app

    with pytest.raises(SystemExit) as ended:
        app(args, prog_name="dase")
    assert ended.value.code == 0
    ((checked, name),) = asked
    assert (name, checked.folder.path) == ("seed-1", tmp_path / "runs" / "e")


def test_names_are_those_of_a_host_and_change_with_what_is_asked():
    job = job_of(name="X" * 80 + " größe")
    assert len(f"{job.job_name}-9999") <= 63
    assert job.job_name.replace("-", "").isalnum()
    assert job.job_name == job.job_name.lower()
    others = [job_of(), job_of(small_cells(seed=[0, 1])), job_of(text=f"{TEXT}#"), job_of(at_once=3)]
    assert len({each.job_name for each in others}) == 4
    assert job_of().job_name == job_of().job_name


def test_too_many_cells_for_a_config_map_are_refused():
    with pytest.raises(ConfigError) as refused:
        job_of(text="#" * LARGEST_BYTES).manifests()
    assert_one_sentence(refused.value, "the names of 3 cells have", "write several files")


def test_without_its_library_it_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError) as refused:
        yaml_text([])
    assert_one_sentence(refused.value, 'pip install "dase-grpc[kubernetes]"')


# -- kubectl ------------------------------------------------------------------------------------------

FAKE = """
import sys
from pathlib import Path
folder = Path(sys.argv[0]).parent
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if (folder / "refuses").exists():
    sys.exit((folder / "refuses").read_text())
if sys.argv[1] == "get":
    sys.stdout.write((folder / "jobs.json").read_text())
if sys.argv[1] == "apply":
    (folder / "applied.yaml").write_text(sys.stdin.read())
"""


class FakeKubectl:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        program = self.folder / "kubectl"
        program.write_text(f"#!{sys.executable} -S\n{FAKE}")
        program.chmod(0o755)
        self.jobs()

    def jobs(self, **conditions: str | None) -> None:
        """The Jobs that there are, by name, with how each has ended."""
        items = [
            {
                "metadata": {"name": name},
                "status": {} if ended is None else {"conditions": [{"type": ended, "status": "True"}]},
            }
            for name, ended in conditions.items()
        ]
        (self.folder / "jobs.json").write_text(json.dumps({"items": items}))

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def applied(self) -> list[dict]:
        return list(yaml.safe_load_all((self.folder / "applied.yaml").read_text()))


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    fake = FakeKubectl(tmp_path)
    monkeypatch.setenv("PATH", f"{fake.folder}:/usr/bin:/bin")
    return fake


def test_kubectl_is_given_the_manifests(kubectl):
    job = job_of(namespace="lab")
    apply(job)
    assert kubectl.applied() == job.manifests()
    assert kubectl.calls() == [
        "get jobs --namespace=lab --selector=dase/experiment=dase-small-buffer --output=json",
        "apply --filename=-",
    ]


def test_a_scheduler_is_spoken_to_in_utf_8_whatever_the_locale():
    code = """
from dase_grpc.launch.experiments.schedulers import told
assert told(["cat"], asked="cat", given=chr(955)) == chr(955)
"""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env=importing(Path.cwd()) | plain, check=True)


def test_while_a_job_of_the_experiment_runs_no_other_is_made(kubectl):
    kubectl.jobs(other="Complete", running=None)
    with pytest.raises(SchedulerError) as refused:
        apply(job_of())
    assert_one_sentence(
        refused.value, "job running still runs cells", "--namespace=default delete job running"
    )
    assert len(kubectl.calls()) == 1


def test_the_same_job_is_made_anew_once_it_has_failed(kubectl):
    job = job_of()
    kubectl.jobs(**{job.job_name: "Failed"})
    apply(job)
    assert kubectl.calls()[1] == f"delete job {job.job_name} --namespace=default --wait"
    assert kubectl.applied() == job.manifests()


def test_what_kubectl_says_is_one_sentence(kubectl, monkeypatch):
    (kubectl.folder / "refuses").write_text("The connection to the server was refused\n")
    with pytest.raises(SchedulerError) as refused:
        apply(job_of())
    assert_one_sentence(refused.value, "kubectl get fails: The connection to the server was refused")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError) as missing:
        apply(job_of())
    assert_one_sentence(missing.value, "--apply finds no kubectl in the PATH")


# -- the command --------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tables = {"set": SETTINGS, "matrix": {"seed": [0, 1]}, "kubernetes": POD}
    Path("e.toml").write_text(tomli_w.dumps(tables))
    return Path("e.toml")


def run(file: Path, **options) -> int:
    return experiment_here(ExperimentOptions(file, Path("runs"), place="kubernetes", **options))


def test_the_manifest_goes_to_stdout_and_what_is_said_does_not(file, capsys):
    assert run(file) == 0
    said = capsys.readouterr()
    config, job = yaml.safe_load_all(said.out)
    assert config["data"]["experiment.toml"] == file.read_text()
    assert job["spec"]["completions"] == 2
    assert said.err.startswith("2 cells: 2 waiting; ")
    assert not Path("runs").exists()


def test_what_an_environment_prints_is_no_part_of_the_manifest(file, capsys, monkeypatch):
    probed = checks.probed

    def loud(config):
        sys.stdout.write("hello from an environment\n")
        return probed(config)

    monkeypatch.setattr(checks, "probed", loud)
    assert run(file) == 0
    said = capsys.readouterr()
    assert said.out.startswith("apiVersion: v1\n")
    assert "hello from an environment" in said.err


def test_applied_it_says_how_to_follow(file, kubectl, capsys):
    assert run(file, apply=True) == 0
    said = capsys.readouterr()
    assert said.out == ""
    (name,) = {each["metadata"]["name"] for each in kubectl.applied()}
    assert said.err.splitlines()[-1] == (
        f"2 cells are given to job {name}; to follow it: kubectl --namespace=default get job {name}"
    )


def test_without_a_table_there_is_no_job(file):
    file.write_text(tomli_w.dumps({"set": SETTINGS, "matrix": {"seed": [0, 1]}}))
    with pytest.raises(ConfigError) as refused:
        run(file)
    assert_one_sentence(
        refused.value, "--on kubernetes needs a table [kubernetes] in e.toml", "image and claim"
    )
