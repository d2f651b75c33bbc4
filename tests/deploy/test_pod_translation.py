"""Pods without a cluster: how workloads become pods that podman plays, and what is refused."""

import re
from pathlib import Path

import pytest
import yaml
from deploy.charts import Rendered
from deploy.releases import TLS, named, release, secret
from play_pods import read_release
from pods.translation import Files, NotPlayable, Pod, Release, files_of, playable
from pods.volumes import write_volume


@pytest.fixture
def whole(rendered: dict[str, Rendered]) -> Release:
    return release(rendered["everything"])


@pytest.fixture
def endless(rendered: dict[str, Rendered]) -> Release:
    return release(rendered["own volumes"])


def test_every_workload_becomes_its_pods(whole, endless):
    job = whole.of("Job")[0]["metadata"]["name"]
    assert sorted(pod.name for pod in whole.pods()) == sorted(
        [f"run-dase-replay-{shard}" for shard in range(3)]
        + [f"{job}-{agent}" for agent in range(2)]
        + [f"run-dase-actor-{agent}-{number}" for agent in range(2) for number in range(1)]
        + ["run-dase-evaluator-0"]
    )
    assert [pod.name for pod in whole.tests()] == ["run-dase-test-replay"]
    assert {pod.name for pod in endless.pods()} >= {"run-dase-learner-0", "run-dase-learner-1"}


def test_a_stateful_pod_has_its_index_its_volume_and_the_names_that_its_service_gives_it(whole, endless):
    replay = named(whole, "replay-1")
    assert replay.environment(replay.container)["DASE_SHARD"] == "1"
    assert "--shard=1/3" in playable(replay, {})["spec"]["containers"][0]["args"]
    assert set(replay.aliases) == {"run-dase-replay", "run-dase-replay-1.run-dase-replay"}
    claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in replay.spec["volumes"]}
    assert claims["data"] == {"claimName": "data-run-dase-replay-1"}
    learner = named(endless, "learner-1")
    assert learner.environment(learner.container)["DASE_AGENT"] == "1"
    assert {"name": "results", "persistentVolumeClaim": {"claimName": "results-run-dase-learner-1"}} in (
        learner.spec["volumes"]
    )


def test_a_pod_of_an_indexed_job_is_told_its_index_and_is_not_started_again_by_podman(whole):
    learner = named(whole, f"{whole.of('Job')[0]['metadata']['name']}-1")
    played = playable(learner, {})
    container = played["spec"]["containers"][-1]
    given = {each["name"]: each["value"] for each in container["env"]}
    assert given["DASE_AGENT"] == given["JOB_COMPLETION_INDEX"] == "1"
    assert "--agent=1" in container["args"]
    assert played["spec"]["restartPolicy"] == "Never"
    assert not {"ports", "lifecycle", "startupProbe", "livenessProbe", "readinessProbe"} & set(container)
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_a_sidecar_starts_first_and_hands_on_what_only_it_sees(whole, tmp_path):
    learner = named(whole, f"{whole.of('Job')[0]['metadata']['name']}-1")
    (volume,) = (each for each in learner.spec["volumes"] if each["name"] == "agents")
    files = files_of(volume, whole)
    assert files is not None
    assert files.mode == 0o440
    assert sorted(files.contents) == [f"{agent}/{key}" for agent in (0, 1) for key in TLS]
    folder = write_volume(tmp_path / "agents", files, group=None)
    spec = playable(learner, {"agents": folder})["spec"]
    assert "initContainers" not in spec
    sidecar, own = spec["containers"]
    assert "/agents/1" in sidecar["args"]
    volumes = {each["name"]: each for each in spec["volumes"]}
    (seen,) = (each for each in sidecar["volumeMounts"] if each["mountPath"] == "/agents")
    assert volumes[seen["name"]]["hostPath"] == {"path": str(folder)}
    assert seen["readOnly"]
    assert seen["name"] not in {each["name"] for each in own["volumeMounts"]}
    shared = {each["name"] for each in sidecar["volumeMounts"]} & {
        each["name"] for each in own["volumeMounts"]
    }
    assert ["emptyDir" in volumes[name] for name in shared] == [True]


def test_a_part_of_a_volume_of_files_is_a_volume(tmp_path):
    mount = {"name": "tls", "mountPath": "/tls", "subPathExpr": "$(WHICH)"}
    container = {"name": "one", "env": [{"name": "WHICH", "value": "b"}], "volumeMounts": [mount]}
    spec = {"containers": [container], "volumes": [{"name": "tls", "secret": {"secretName": "x"}}]}
    pod = Pod("alone", "", 0, {"name": "alone"}, spec)
    folder = write_volume(tmp_path / "tls", Files({"a/key": b"", "b/key": b""}), group=None)
    (volume,) = playable(pod, {"tls": folder})["spec"]["volumes"]
    place = Path(volume["hostPath"]["path"])
    assert place.name == "b"
    assert [file.name for file in place.iterdir()] == ["key"]


def test_pods_share_the_volume_of_a_claim_and_no_empty_one(whole):
    job = whole.of("Job")[0]["metadata"]["name"]
    volumes = [playable(named(whole, f"{job}-{agent}"), {})["spec"]["volumes"] for agent in (0, 1)]
    empty = [{each["name"] for each in found if "emptyDir" in each} for found in volumes]
    assert empty[0]
    assert not empty[0] & empty[1]
    claims = [
        [each["persistentVolumeClaim"] for each in found if "persistentVolumeClaim" in each]
        for found in volumes
    ]
    assert claims[0] == claims[1] == [{"claimName": "run-dase-results"}]


def test_files_of_a_volume_change_all_at_once(tmp_path):
    write_volume(tmp_path / "tls", Files({"tls.crt": b"old", "tls.key": b"old"}, mode=0o400), group=None)
    seen = (tmp_path / "tls" / "..data").resolve()
    write_volume(tmp_path / "tls", Files({"tls.crt": b"new", "tls.key": b"new"}, mode=0o400), group=None)
    assert not seen.exists()
    assert {path.read_bytes() for path in (tmp_path / "tls").glob("tls.*")} == {b"new"}
    assert (tmp_path / "tls" / "tls.key").stat().st_mode & 0o777 == 0o400


@pytest.mark.slow
def test_what_is_not_there_or_not_done_is_said(whole, tmp_path):
    with pytest.raises(NotPlayable, match="the Secret dase-tls-x is in none of the files"):
        files_of({"name": "tls", "secret": {"secretName": "dase-tls-x"}}, whole)
    with pytest.raises(NotPlayable, match="volume data is of a kind"):
        files_of({"name": "data", "nfs": {}}, whole)
    two = {"kind": "Pod", "metadata": {"name": "two"}, "spec": {"containers": [{}, {}]}}
    with pytest.raises(NotPlayable, match="more than one container"):
        Release((two,)).pods()
    (tmp_path / "notes.yaml").write_text("Run run: 2 learners\n")
    with pytest.raises(NotPlayable, match=r"notes\.yaml holds something that is no manifest"):
        read_release([tmp_path / "notes.yaml"])
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(NotPlayable, match=r"broken\.yaml cannot be read"):
        read_release([tmp_path / "broken.yaml"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "anything that makes pods"),
        ("kind: List\nmetadata: {name: all}\nitems: []", "anything that makes pods"),
        ("kind: Pod\nmetadata: 3", "no manifest"),
        ("kind: Job\nmetadata: {}", "no manifest"),
        ("kind: Job\nmetadata: {name: x}", "Job x is none that Kubernetes would take"),
        (
            "kind: StatefulSet\nmetadata: {name: x}\nspec: {template: {spec: {containers: 7}}}",
            "StatefulSet x is none that Kubernetes would take",
        ),
    ],
)
def test_files_of_which_no_pod_comes_are_refused(tmp_path, text, says):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(NotPlayable, match=says):
        read_release([tmp_path / "run.yaml"])


@pytest.mark.parametrize("key", ["completions", "parallelism", "backoffLimitPerIndex"])
@pytest.mark.parametrize("value", ["three", "3", -1, 1.5, True, None])
def test_a_job_whose_numbers_are_none_is_refused_in_a_sentence(key, value):
    spec = {"completionMode": "Indexed", "completions": 2, key: value}
    job = {"kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    with pytest.raises(NotPlayable, match=re.escape(f"Job x: its {key} is {value!r}, and has to be")):
        Release((job,)).pods()


def test_the_manifests_that_are_read_are_those_that_helm_prints(rendered, tmp_path):
    manifests = rendered["plain"].manifests
    (tmp_path / "run.yaml").write_text(yaml.safe_dump_all(manifests))
    (tmp_path / "secrets.yaml").write_text(yaml.safe_dump(secret("replay")))
    read = read_release([tmp_path / "run.yaml", tmp_path / "secrets.yaml"])
    assert len(read.manifests) == len(manifests) + 1
