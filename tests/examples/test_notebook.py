"""The notebook of the tutorial: kept without outputs, and run as a reader runs it, only shorter."""

from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"
SHORT = "STEPS, START_STEPS = 400, 100"


@pytest.fixture
def notebook():
    import nbformat  # here and below: it takes every worker of the tests half a second to import

    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_kept_without_outputs(notebook):
    import nbformat

    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)


@pytest.mark.long  # page 1 of the tutorial does the same on the command line
def test_it_trains_draws_acts_films_and_exports_and_leaves_no_process(notebook, tmp_path):
    import nbclient

    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source = SHORT
    before = psutil.Process().children(recursive=True)
    nbclient.NotebookClient(
        notebook, timeout=PATIENCE_S, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = "".join(output.get("text", "") for output in outputs)
    assert "none of which differs by more than" in said
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert {"image/png", "text/html"} <= set(shown)
    assert (tmp_path / "runs").is_dir()
    assert [each for each in psutil.Process().children(recursive=True) if each not in before] == []
