"""The Helm chart: valid for several Kubernetes versions, refuses nonsense, and hangs together."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from children import ran
from deploy.charts import CHART, CONFIG, MONITORED, VALUES, VARIABLE, Helm, Rendered
from deploy.conftest import fetched
from deploy.deployed import DASHBOARDS, PROJECT, RULES
from patience import PATIENCE_S, wait_until

from dase_grpc.config.texts import transitions

VERSIONS = ("1.31.0", "1.34.0", "1.36.0", "1.37.0")
FILES = ("ca.crt", "tls.crt", "tls.key")
CUSTOM = {"PodMonitor", "PrometheusRule", "Certificate"}

for_all_values = pytest.mark.parametrize("values", VALUES)


@pytest.fixture(params=VALUES)
def made(rendered: dict[str, Rendered], request: pytest.FixtureRequest) -> Rendered:
    return rendered[request.param]


@pytest.fixture
def whole(rendered: dict[str, Rendered]) -> Rendered:
    """With everything that can be switched on."""
    return rendered["everything"]


@for_all_values
def test_helm_finds_nothing_to_complain_of(helm, values):
    linted = helm.run("lint", "--strict", CHART, *(f"--set={each}" for each in VALUES[values]))
    assert linted.returncode == 0, linted.stdout + linted.stderr


@for_all_values
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.slow
def test_the_manifests_are_valid(helm, values, version):
    validate = pytest.importorskip("kubernetes_validate").validate
    rendered = helm.template(*VALUES[values], version=version)
    assert rendered.returncode == 0, rendered.stderr
    manifests = [each for each in yaml.safe_load_all(rendered.stdout) if each]
    for each in manifests:
        if each["kind"] not in CUSTOM:
            validate(each, version.rpartition(".")[0], strict=True)


def test_a_kubernetes_that_is_too_old_is_refused(helm):
    refused = helm.template(version="1.30.0")
    assert refused.returncode
    assert "kubeVersion" in refused.stderr


@pytest.mark.slow
def test_custom_resources_are_valid(whole):
    folder = PROJECT / ".cache" / "crd-models"
    there = fetched("get_crd_models.sh", folder)
    if there.returncode:
        pytest.skip(f"no models of custom resources: {there.stderr.strip()[-200:]}")
    custom = [each for each in whole.manifests if each["kind"] in CUSTOM]
    assert {each["kind"] for each in custom} == CUSTOM
    broken = {**custom[0], "metadata": {"name": "broken"}, "spec": {"nonsense": 1}}
    script = Path(__file__).with_name("validate_crds.mjs")
    objects = "\n".join(map(json.dumps, [*custom, broken]))
    told = ran("node", script, folder, input=objects, check=True).stdout
    assert told.startswith(f"{broken['kind']} broken: ")
    assert "nonsense" in told or "required" in told


def test_names_are_unique_and_whoever_is_referred_to_is_there(made):
    names = [(each["kind"], each["metadata"]["name"]) for each in made.manifests]
    assert len(set(names)) == len(names)
    for workload in made.workloads:
        assert ("ServiceAccount", workload.spec["serviceAccountName"]) in names
        for volume in workload.spec["volumes"]:
            if "configMap" in volume and volume["name"] != "crl":  # which is made by hand
                assert ("ConfigMap", volume["configMap"]["name"]) in names
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
    for each in made.of("StatefulSet"):
        assert ("Service", each["spec"]["serviceName"]) in names


def test_every_selector_finds_the_pods_it_is_for_and_no_others(made):
    for each in made.of("StatefulSet") + made.of("Deployment") + made.of("PodDisruptionBudget"):
        wanted = each["spec"]["selector"]["matchLabels"].items()
        found = [workload for workload in made.workloads if wanted <= workload.labels.items()]
        assert [workload.manifest["metadata"]["name"] for workload in found] == [each["metadata"]["name"]]
    for each in made.of("Service"):
        wanted = each["spec"]["selector"].items()
        (found,) = [workload for workload in made.workloads if wanted <= workload.labels.items()]
        ports = {port["name"] for port in found.container["ports"]}
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports


def test_nodes_dial_the_replays_pods_by_the_names_that_its_service_gives_them(made):
    (replay,) = made.role("replay")
    name, service = replay.manifest["metadata"]["name"], replay.manifest["spec"]["serviceName"]
    shards = replay.manifest["spec"]["replicas"]
    addresses = [f"{name}-{shard}.{service}:50051" for shard in range(shards)]
    nodes = [each for role in ("learner", "actor", "evaluator") for each in made.role(role)]
    assert nodes
    assert all(f"--replay={','.join(addresses)}" in each.container["args"] for each in nodes)
    told = [argument for argument in replay.arguments(1) if argument.startswith("--shard")]
    assert told == ([f"--shard=1/{shards}"] if shards > 1 else [])


def test_every_variable_that_is_used_is_declared(made):
    for workload in made.workloads:
        containers = [workload.container, *workload.sidecars]
        for container in containers:
            used = {name for text in container["args"] for name in VARIABLE.findall(text)}
            assert used <= {each["name"] for each in container.get("env", [])}
        volumes = {volume["name"] for volume in workload.spec["volumes"]}
        claimed = workload.manifest["spec"].get("volumeClaimTemplates", [])
        volumes |= {each["metadata"]["name"] for each in claimed}
        mounted = {each["name"] for container in containers for each in container["volumeMounts"]}
        assert mounted == volumes


def test_a_learner_sees_the_certificate_of_its_own_agent_alone(whole):
    (learner,) = whole.role("learner")
    (mount,) = (each for each in learner.container["volumeMounts"] if each["name"] == "tls")
    assert mount == {"name": "tls", "mountPath": "/etc/dase/tls", "readOnly": True}
    assert "agents" not in {each["name"] for each in learner.container["volumeMounts"]}
    volumes = {each["name"]: each for each in learner.spec["volumes"]}
    assert volumes["tls"]["emptyDir"]["medium"] == "Memory"
    (sidecar,) = learner.sidecars
    assert sidecar["restartPolicy"] == "Always"  # else the learner would wait for its end
    _, _, *folders, every_s = sidecar["args"]
    assert folders == ["/agents/$(DASE_AGENT)", "/own"]
    assert int(every_s) <= 5
    assert {each["mountPath"] for each in sidecar["volumeMounts"]} == {"/agents", "/own"}
    assert not [each for each in sidecar["volumeMounts"] if "subPathExpr" in each]  # it would not be renewed
    volume = volumes["agents"]
    assert volume["projected"]["defaultMode"] == 0o440
    lie = {
        item["path"]: each["secret"]["name"]
        for each in volume["projected"]["sources"]
        for item in each["secret"]["items"]
    }
    assert lie == {f"{agent}/{file}": f"dase-tls-learner-{agent}" for agent in (0, 1) for file in FILES}


def test_a_renewed_certificate_reaches_the_learner_which_reads_its_own_alone(whole, tmp_path):
    """The sidecar's script, on folders as the kubelet makes them: a link changes all files at once."""
    (learner,) = whole.role("learner")
    (sidecar,) = learner.sidecars
    script, name, *_ = sidecar["args"]
    agents, own = tmp_path / "agents", tmp_path / "own"
    own.mkdir()
    projected(agents, "first")
    command = [*sidecar["command"], script, name, agents / "1", own, "0.01"]
    with subprocess.Popen(command) as copying:
        wait_until(lambda: held(own) == ["first 1"] * 3)
        assert all(file.stat().st_mode & 0o077 == 0 for file in own.iterdir())
        projected(agents, "second")
        wait_until(lambda: held(own) == ["second 1"] * 3)
        assert sorted(file.name for file in own.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
        copying.terminate()
        assert copying.wait(PATIENCE_S) == 0


def projected(folder, text):
    """A projected volume of two agents' certificates."""
    data = folder / f"..{text}"
    for agent in ("0", "1"):
        (data / agent).mkdir(parents=True)
        for file in FILES:
            (data / agent / file).write_text(f"{text} {agent}")
        if not (folder / agent).is_symlink():
            (folder / agent).symlink_to(f"..data/{agent}")
    (folder / "..new").symlink_to(data.name)
    (folder / "..new").replace(folder / "..data")


def held(folder):
    """What the files of a certificate hold, of those that are there."""
    return [(folder / file).read_text() for file in FILES if (folder / file).exists()]


def test_the_replay_reads_the_list_of_withdrawn_certificates_from_a_folder_that_is_renewed(whole, rendered):
    (replay,) = whole.role("replay")
    assert "--crl=/etc/dase/crl/ca.crl" in replay.container["args"]
    (mount,) = (each for each in replay.container["volumeMounts"] if each["name"] == "crl")
    assert mount == {"name": "crl", "mountPath": "/etc/dase/crl", "readOnly": True}
    (plain,) = rendered["as it is"].role("replay")
    assert not [each for each in plain.container["args"] if each.startswith("--crl")]


def test_cert_manager_is_asked_for_every_certificate_that_is_mounted_and_for_what_docs_say_of_it(whole):
    asked = {each["spec"]["secretName"]: each["spec"] for each in whole.of("Certificate")}
    mounted = set()
    for workload in whole.workloads:
        for volume in workload.spec["volumes"]:
            mounted |= {volume["secret"]["secretName"]} if "secret" in volume else set()
            mounted |= {each["secret"]["name"] for each in volume.get("projected", {}).get("sources", [])}
    assert set(asked) == mounted
    assert asked["dase-tls-learner-1"]["uris"] == ["spiffe://dase/learner/1"]
    assert asked["dase-tls-actor-0"]["uris"] == ["spiffe://dase/actor/0"]
    assert asked["dase-tls-evaluator"]["uris"] == ["spiffe://dase/evaluator"]
    replay = asked["dase-tls-replay"]
    assert replay["uris"] == ["spiffe://dase/replay"]
    assert replay["dnsNames"] == [f"run-dase-replay-{shard}.run-dase-replay" for shard in range(3)]
    assert "server auth" in replay["usages"]
    assert all(
        "server auth" not in each["usages"] for name, each in asked.items() if name != "dase-tls-replay"
    )


def test_names_that_look_like_numbers_or_truth_stay_text(helm):
    given = (
        "run.id=20261201",
        "replay.priorityClassName=1",
        "replay.storage.storageClass=2",
        "extraEnv.ON=3",
    )
    given += ("results.existingClaim=4", "tls.crlConfigMap=5", "learners.gpu.runtimeClassName=6")
    texts = [f"--set-string={each}" for each in given]
    made = helm.run("template", "1", CHART, *texts, f"--set={MONITORED},actors.perAgent=1")
    assert made.returncode == 0, made.stderr
    wrong = [
        (key, value)
        for manifest in yaml.safe_load_all(made.stdout)
        for key, value in named_in(manifest)
        if not isinstance(value, str)
    ]
    assert wrong == []


TEXTS = ("name", "replacement", "secretName", "claimName")


def named_in(value: object) -> Iterator[tuple[str, object]]:
    """What a manifest names: labels, annotations, and fields that hold a name, with their keys."""
    if isinstance(value, list):
        for each in value:
            yield from named_in(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key in ("labels", "matchLabels", "annotations"):
                yield from each.items()
            elif isinstance(each, (dict, list)):
                yield from named_in(each)
            elif key in TEXTS or key.endswith("ClassName"):
                yield key, each


def test_settings_go_into_the_config_map_as_they_are(whole):
    assert whole.named("ConfigMap", "run-dase-run")["data"]["run.toml"] == CONFIG


def test_rules_and_dashboards_are_those_of_the_project(whole):
    rules = [each["spec"] for each in whole.of("PrometheusRule")]
    assert rules == [yaml.safe_load(path.read_text(encoding="utf-8")) for path in RULES]
    shown = {
        name: json.loads(text)
        for each in whole.of("ConfigMap")
        if each["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in each["data"].items()
    }
    assert shown == {path.name: json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS}
    assert all((CHART / "files" / name).is_symlink() for name in ("rules", "dashboards"))


def test_pods_are_scraped_under_the_names_of_jobs_that_alerts_go_by(whole):
    (monitor,) = whole.of("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    job = next(each for each in endpoint["relabelings"] if each["targetLabel"] == "job")
    assert job["sourceLabels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
    assert job["replacement"] == "dase-$1"
    (wanted,) = monitor["spec"]["selector"]["matchExpressions"]
    scraped = [each for each in whole.workloads if each.role in wanted["values"]]
    assert {each.role for each in scraped} == {"replay", "learner", "actor", "evaluator"}
    assert all(endpoint["port"] in {port["name"] for port in each.container["ports"]} for each in scraped)


def test_the_network_policies_cover_every_pod_and_let_only_this_run_in(whole):
    replay, nodes = (whole.named("NetworkPolicy", f"run-dase-{name}") for name in ("replay", "nodes"))
    run = {"app.kubernetes.io/name": "dase", "app.kubernetes.io/instance": "run"}
    assert replay["spec"]["podSelector"]["matchLabels"] == {**run, "app.kubernetes.io/component": "replay"}
    assert nodes["spec"]["podSelector"]["matchLabels"] == run
    grpc, metrics = replay["spec"]["ingress"]
    assert grpc["from"] == [{"podSelector": {"matchLabels": run}}]
    assert {port["port"] for port in metrics["ports"]} == {"metrics"}
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}]
    assert replay["spec"]["egress"] == []


@pytest.mark.slow
def test_a_change_of_settings_makes_another_job_and_one_of_the_replay_does_not(helm: Helm):
    def job(*sets: str) -> str:
        (found,) = helm.rendered(*sets).of("Job")
        return str(found["metadata"]["name"])

    assert job("run.preset=paper/td3") != job()
    assert job("learners.resources.limits.memory=8Gi") != job()
    assert job("replay.resources.limits.memory=8Gi") == job()
    assert len(job()) <= 63


def test_other_settings_start_the_pods_again_that_read_them_and_no_other(helm: Helm):
    def templates(config: str) -> dict[str, dict[str, Any]]:
        made = helm.rendered("actors.perAgent=1,evaluator.enabled=true", config=config)
        return {each.role: each.template for each in made.workloads}

    before, after = templates("[train]\nsteps = 5_000\n"), templates("[train]\nsteps = 6_000\n")
    changed = {role for role in before if before[role] != after[role]}
    assert changed == {"learner", "actor", "evaluator"}


REFUSED = {
    "learners.cuont=3": "cuont",
    "learners.count=0": "count",
    "learners.mode=deployment": "mode",
    "learners.gpu.count=one": "count",
    "replay.capacity=much": "capacity",
    "replay.storage.size=ten": "size",
    "replay.shards=0": "shards",
    "image.digest=sha256:short": "digest",
    "image.pullPolicy=Sometimes": "pullPolicy",
    "run.preset=papers/td3": "preset",
    "tls.certManager.duration=90": "duration",
    "metrics.podMonitor.interval=often": "interval",
    "extraEnv.lower=1": "lower",
    "results.perLearner=true": "needs learners.mode statefulset",
    "learners.explore=false": "nobody would explore",
    "learners.explore=false,actors.perAgent=1,replay.shards=2": "a replay in one piece",
    "actors.autoscaling.enabled=true": "perAgent",
    "actors.perAgent=9,actors.autoscaling.enabled=true": "maxPerAgent",
    "learners.mode=statefulset,results.perLearner=true,results.existingClaim=x": "existingClaim",
}


@pytest.mark.parametrize("nonsense", REFUSED)
def test_nonsense_is_refused_by_name(helm, nonsense):
    refused = helm.template(nonsense)
    assert refused.returncode
    assert REFUSED[nonsense] in refused.stderr


CAPACITIES = {
    **dict.fromkeys(
        ("500000", "1", "2GiB", "2 GiB", "512MB", "1.5GB", "0.5GiB", "100000B", "2gib", "1TiB"), True
    ),
    **dict.fromkeys(("2Gi", "2G", "1k", "1.5", "1_000", "1e6", "0", "0GiB", "2 GiBs", "1..5GB", "-1"), False),
}


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_chart_takes_the_capacities_that_a_replay_takes(helm, capacity):
    assert (helm.template(f"replay.capacity={capacity}").returncode == 0) == CAPACITIES[capacity]
    with nullcontext() if CAPACITIES[capacity] else pytest.raises(ValueError, match=re.escape(capacity)):
        transitions(capacity, row_bytes=1)


def test_every_value_is_in_the_schema_and_the_other_way_round():
    def named(schema: dict[str, object]) -> dict[str, object] | None:
        properties = schema.get("properties")
        return {key: named(each) for key, each in properties.items()} if properties else None

    def given(value: object) -> dict[str, object] | None:
        return {key: given(each) for key, each in value.items()} if isinstance(value, dict) else None

    def same(schema: dict[str, object] | None, value: dict[str, object] | None, where: str) -> None:
        if schema is not None and value:
            assert set(schema) == set(value), where
            for key in schema:
                same(schema[key], value[key], f"{where}.{key}")

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    schema["properties"].pop("global")
    same(named(schema), given(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))), "values")


def test_the_notes_say_which_secrets_pods_wait_for(helm):
    sets = ("learners.count=3", "actors.perAgent=1", "replay.shards=2")
    said = helm.run("install", "run", CHART, "--dry-run=client", *(f"--set={each}" for each in sets))
    assert said.returncode == 0, said.stderr
    notes = said.stdout.partition("NOTES:")[2]
    assert "run-dase-replay-0.run-dase-replay run-dase-replay-1.run-dase-replay" in notes
    assert "dase-tls-learner-0 to dase-tls-learner-2" in notes
    assert "dase-tls-actor-0" in notes
    assert "WARNING" not in notes
    plain = helm.run("install", "run", CHART, "--dry-run=client", "--set=tls.enabled=false")
    assert "WARNING: tls.enabled is false" in plain.stdout
