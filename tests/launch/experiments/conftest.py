"""A folder of an experiment, and a cell of it."""

import pytest
from launch.experiment_cases import small_cells

from dase_grpc.launch.experiments.folder import OWN_FOLDER, ExperimentFolder


@pytest.fixture
def cell():
    return small_cells()[0]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / OWN_FOLDER).mkdir()
    return ExperimentFolder(tmp_path)
