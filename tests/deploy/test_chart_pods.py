"""The pods of the chart: without rights, with probes that are answered, and told what `dase` understands."""

import re

import pytest
from deploy.charts import CONFIG, VALUES, Rendered, Workload

from dase_grpc import __main__
from dase_grpc.cli.main import app
from dase_grpc.metrics.endpoint import LIVE_PATH, READY_PATH
from dase_grpc.nodes.options import GRACE_S
from dase_grpc.process.tasks import ANSWER_S
from dase_grpc.replay.client.handoff import USUAL
from dase_grpc.replay.client.membership import FAREWELL_S

CHECKPOINT_S = 30.0
"""What is left for a checkpoint on a slow volume."""


CLIENTS = ("learner", "actor", "evaluator")


@pytest.fixture(params=VALUES)
def values(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pods(rendered: dict[str, Rendered], values: str) -> list[Workload]:
    return rendered[values].workloads


@pytest.fixture
def nodes(pods: list[Workload]) -> list[Workload]:
    return [each for each in pods if each.role != "test"]


def test_pods_have_no_rights(pods):
    for pod in pods:
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] == security["fsGroup"] == 65532
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(pod.spec)
        for container in (pod.container, *pod.sidecars):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        assert all("hostPath" not in volume for volume in pod.spec["volumes"])


def test_what_pods_write_has_a_place(pods):
    for pod in pods:
        assert {"name": "tmp", "mountPath": "/tmp"} in pod.container["volumeMounts"]
        (tmp,) = (each for each in pod.spec["volumes"] if each["name"] == "tmp")
        assert tmp["emptyDir"]["sizeLimit"]


def test_pods_say_what_they_need_and_who_they_are(pods):
    for pod in pods:
        assert {"cpu", "memory"} <= set(pod.container["resources"]["requests"])
        assert "memory" in pod.container["resources"]["limits"]
        for labels in (pod.labels, pod.manifest["metadata"]["labels"]):
            for name in ("name", "instance", "component", "version", "part-of", "managed-by"):
                assert labels[f"app.kubernetes.io/{name}"]
        assert not pod.container["image"].endswith((":latest", ":"))


def test_probes_ask_paths_and_ports_that_exist_and_wait_for_the_answer(nodes):
    for node in nodes:
        named = {port["name"]: port["containerPort"] for port in node.container["ports"]}
        assert f"--metrics-port={named['metrics']}" in node.container["args"]
        asked = {kind: node.container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
        paths = {kind: probe["httpGet"]["path"] for kind, probe in asked.items()}
        assert paths == {"startup": LIVE_PATH, "readiness": READY_PATH, "liveness": LIVE_PATH}
        for probe in asked.values():
            assert probe["httpGet"]["port"] == "metrics"
            assert probe["timeoutSeconds"] > ANSWER_S
        assert asked["startup"]["periodSeconds"] * asked["startup"]["failureThreshold"] >= 300
        dead_s = asked["liveness"]["periodSeconds"] * asked["liveness"]["failureThreshold"]
        assert dead_s >= (600 if node.role == "replay" else 60)  # it may wait for its disk


def shards(node: Workload) -> int:
    (addresses,) = (each for each in node.container["args"] if each.startswith("--replay="))
    return addresses.count(",") + 1


def test_nodes_have_time_to_end_in_order(nodes):
    for node in nodes:
        grace_s = node.spec["terminationGracePeriodSeconds"]
        sleep_s = node.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if node.role == "replay":  # it outlasts learners that drain
            assert sleep_s > USUAL.drain_s
            assert grace_s >= sleep_s + GRACE_S + CHECKPOINT_S + __main__.EXIT_S
        if node.role == "learner":  # the compute thread, the last rows, the last policy, its leases
            drain_s = 3 * USUAL.drain_s + 2 * FAREWELL_S * shards(node)
            assert grace_s >= sleep_s + drain_s + CHECKPOINT_S + __main__.EXIT_S
        if node.role == "actor":  # its thread, the last rows
            assert grace_s >= 2 * USUAL.drain_s + 2 * FAREWELL_S * shards(node) + __main__.EXIT_S


def test_a_replay_that_would_have_no_time_to_end_is_refused(helm):
    ends_s = GRACE_S + CHECKPOINT_S + __main__.EXIT_S
    enough = "replay.preStopSeconds=600,replay.terminationGracePeriodSeconds={:.0f}"
    refused = helm.template(enough.format(600 + ends_s - 1))
    assert f"needs {600 + ends_s:.0f} s to end" in refused.stderr
    assert helm.template(enough.format(600 + ends_s)).returncode == 0


def test_learners_of_a_job_are_replaced_and_not_counted_when_they_are_stopped(nodes):
    for node in nodes:
        if node.manifest["kind"] != "Job":
            continue
        spec = node.manifest["spec"]
        (told,) = re.findall(r"--unfinished-code=(\d+)", " ".join(node.container["args"]))
        rules = spec["podFailurePolicy"]["rules"]
        assert {rule["action"] for rule in rules} == {"Ignore"}
        assert rules[0]["onExitCodes"]["values"] == [int(told)]
        assert rules[0]["onExitCodes"]["containerName"] == node.container["name"]
        assert spec["podReplacementPolicy"] == "Failed"
        assert node.spec["restartPolicy"] == "Never"
        assert spec["completions"] == spec["parallelism"]


def test_what_is_started_again_whatever_its_code_stays_when_it_has_finished(nodes):
    for node in nodes:
        if node.role != "replay":  # which has no end of its own
            always = node.spec.get("restartPolicy", "Always") == "Always"
            assert ("--stay" in node.container["args"]) == always, node.name


def test_learners_go_on_from_their_checkpoints_on_a_volume_that_outlives_them(nodes):
    for node in nodes:
        if node.role != "learner":
            continue
        assert "--resume" in node.container["args"]
        (run_dir,) = re.findall(r"--run-dir=(\S+)", " ".join(node.container["args"]))
        (mount,) = (each for each in node.container["volumeMounts"] if each["name"] == "results")
        assert run_dir.startswith(mount["mountPath"])


def test_a_gpu_is_asked_for_and_used_or_neither(nodes):
    for node in nodes:
        asked = node.container["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert ("--gpu=0" in node.container["args"]) == (asked > 0)
        assert ("runtimeClassName" in node.spec) == (asked > 0)


@pytest.fixture
def parsed(tmp_path, monkeypatch):
    """What the real command line makes of a node's arguments."""
    (tmp_path / "run.toml").write_text(CONFIG)

    def options_of(node):
        started = []

        def start(options, *, stdin_is_leash):
            started.append(options)
            return 0

        monkeypatch.setattr(f"dase_grpc.nodes.{node.role}.{node.role}_main", start, raising=True)
        args = [each.replace("/etc/dase/run", str(tmp_path)) for each in node.arguments(1)]
        assert args[0] == "node"
        with pytest.raises(SystemExit) as ended:
            app(args)
        assert ended.value.code in (0, None)
        (options,) = started
        return options

    return options_of


@pytest.mark.parametrize("role", ["replay", "learner", "actor", "evaluator"])
def test_dase_understands_what_nodes_are_told(nodes, role, parsed):
    told = [node for node in nodes if node.role == role]
    if not told:
        pytest.skip(f"these values start no {role}")
    assert {parsed(node).metrics_port for node in told} == {9500}


def test_nodes_of_a_run_have_the_same_settings_and_whoever_shares_a_volume_evaluates_for_all(
    values, rendered, parsed
):
    nodes = {each.role: parsed(each).config for each in rendered[values].workloads if each.role in CLIENTS}
    assert len(set(map(repr, nodes.values()))) == 1
    evaluates = "evaluator" in nodes and "results.perLearner=true" not in "".join(VALUES[values])
    assert nodes["learner"].eval.by == ("evaluator" if evaluates else "learner")
    assert nodes["learner"].train.explore == ("learners.explore=false" not in "".join(VALUES[values]))
