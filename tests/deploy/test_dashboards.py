"""Grafana's dashboards: what the code makes, of expressions that parse, about metrics that exist."""

import re
import sys
from pathlib import Path

import pytest
from children import ran
from deploy.deployed import DASHBOARDS, PROJECT, dashboards, exported, expressions, metrics_in

BOARDS = dashboards()
PARTS = ("overview", "replay", "learners", "followers", "similarity", "distillation", "serving")
VARIABLES = ("run", "replay", "learner", "actor", "evaluator", "server", "agent")
NO_PANEL = {"process_virtual_memory_bytes"}
"""Metrics of the client library that say nothing here: files that are mapped count, used or not."""
SELECTED = re.compile(r"(?<![\w:])((?:dase|grpc_server|process)_\w+|up|ALERTS)\b(\{[^}]*\})?")
"""A metric in an expression, and what is selected of it."""


def test_the_committed_dashboards_are_what_the_code_makes(tmp_path):
    pytest.importorskip("grafana_foundation_sdk")
    ran(sys.executable, "scripts/write_dashboards.py", tmp_path, cwd=PROJECT, check=True)
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text(encoding="utf-8") for path in DASHBOARDS}
    assert made == committed, "run: python scripts/write_dashboards.py"


def test_there_is_a_dashboard_for_each_part():
    assert set(BOARDS) == {f"dase-{part}" for part in PARTS}
    assert all(board["uid"] == name for name, board in BOARDS.items())


@pytest.mark.parametrize("expression", expressions(), ids=lambda expression: expression.where)
def test_every_expression_parses_and_has_no_variable_left(expression):
    parser = pytest.importorskip("promql_parser")
    assert "$" not in expression.text
    parser.parse(expression.text)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_speak_only_of_what_is_exported(path: Path):
    found = metrics_in(path.read_text(encoding="utf-8"))
    assert found
    assert found - exported() == set()


def test_every_metric_has_a_panel():
    shown = set().union(*(metrics_in(each.text) for each in expressions()))
    assert exported() - shown == NO_PANEL


@pytest.mark.parametrize("expression", expressions(), ids=lambda expression: expression.where)
def test_every_series_that_is_shown_is_of_the_chosen_run_and_of_nodes_of_dase(expression):
    for name, selected in SELECTED.findall(expression.text):
        assert 'run=~".*"' in selected, name
        assert name == "ALERTS" or re.search('job=~?"dase-', selected), name


@pytest.mark.parametrize("name", BOARDS)
def test_what_can_be_chosen_is_of_the_chosen_run(name):
    run, *others = BOARDS[name]["templating"]["list"][1:]
    assert run["name"] == "run"
    assert all('{run=~"$run"}' in str(variable["query"]) for variable in others)


@pytest.mark.parametrize("name", BOARDS)
def test_panels_are_numbered_explained_inside_the_grid_and_do_not_overlap(name):
    panels = BOARDS[name]["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"
        place = panel["gridPos"]
        cells = {
            (place["x"] + across, place["y"] + down)
            for across in range(place["w"])
            for down in range(place["h"])
        }
        assert max(across for across, _ in cells) < 24
        assert not cells & taken
        taken |= cells


@pytest.mark.parametrize("name", BOARDS)
def test_every_variable_that_panels_use_is_declared_and_the_other_way_round(name):
    declared = {variable["name"] for variable in BOARDS[name]["templating"]["list"]} - {"datasource"}
    texts = [target["expr"] for panel in BOARDS[name]["panels"] for target in panel["targets"]]
    texts += [str(variable["query"]) for variable in BOARDS[name]["templating"]["list"]]
    assert declared == {each for each in VARIABLES if f"${each}" in "".join(texts)}


def test_the_similarity_of_every_pair_is_a_heat_map():
    panel = BOARDS["dase-similarity"]["panels"][0]
    assert panel["type"] == "table"
    assert panel["targets"][0]["instant"]
    assert panel["targets"][0]["format"] == "table"
    assert panel["fieldConfig"]["defaults"]["custom"]["cellOptions"]["type"] == "color-background"
    assert panel["transformations"] == [
        {
            "id": "groupingToMatrix",
            "options": {"rowField": "agent_id", "columnField": "source_agent_id", "valueField": "Value"},
        }
    ]
