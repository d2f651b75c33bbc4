"""Recording and alert rules: valid, tried both ways, explained, and about metrics that exist."""

import re

import pytest
from deploy.deployed import ALERTS, DEPLOY, PROJECT, RULE_TESTS, RULES, exported, metrics_in
from prometheus_client import generate_latest
from write_metrics import registries

NAMES = re.findall(r"alert: (\w+)", ALERTS)
OPERATIONS = (PROJECT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_the_rules_and_the_scrape_configuration_are_valid(promtool):
    checked = promtool("check", "rules", *RULES)
    assert checked.returncode == 0, checked.stderr
    checked = promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
def test_every_alert_fires_where_it_should_and_only_there(promtool):
    tried = promtool("test", "rules", RULE_TESTS)
    assert tried.returncode == 0, tried.stdout + tried.stderr


def test_every_alert_has_a_firing_and_a_silent_case():
    cases = re.findall(r"name: (\w+) (fires|is silent)", RULE_TESTS.read_text(encoding="utf-8"))
    assert sorted(cases) == sorted((name, how) for name in NAMES for how in ("fires", "is silent"))


def test_what_the_project_wants_to_be_told_of_has_an_alert():
    wanted = "ReplayDown InsertsStalled LearnerStalled SampleLatencyHigh SimilarityStale SimilarityAllZero "
    wanted += "CheckpointStale RowsRefused"
    assert {f"Dase{name}" for name in wanted.split()} <= set(NAMES)


def test_every_alert_leads_to_its_own_section_of_the_runbook():
    runbooks = re.findall(r"alert: (\w+)(?:(?!- alert:).)*?runbook: (\S+)", ALERTS, re.DOTALL)
    assert runbooks == [(name, f"docs/operations.md#{name.lower()}") for name in NAMES]
    sections = re.findall(r"^### (\w+)$", OPERATIONS, re.MULTILINE)
    assert sorted(section for section in sections if section.startswith("Dase")) == sorted(NAMES)


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_rules_speak_only_of_what_is_exported_or_recorded(path):
    text = path.read_text(encoding="utf-8")
    assert metrics_in(text) - exported() == set()
    recorded = {name for rules in RULES for name in re.findall(r"record: (\S+)", rules.read_text())}
    assert set(re.findall(r"\bdase:\w+(?::\w+)+", text)) <= recorded


@pytest.mark.parametrize("registry", registries().values(), ids=registries())
def test_promtool_finds_nothing_wrong_with_the_metrics(promtool, registry):
    checked = promtool("check", "metrics", input=generate_latest(registry).decode())
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
