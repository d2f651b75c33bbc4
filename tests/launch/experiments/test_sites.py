"""The tables [slurm] and [kubernetes] of an experiment's file: what they say, and mistakes."""

import pytest
from contracts.sentences import assert_one_sentence

from dase_grpc.errors import ConfigError
from dase_grpc.launch.experiments.file import parse_experiment
from dase_grpc.launch.experiments.matrix import cells_of

ONE = {"seeds": 1}
POD = {"image": "ours/dase:0.2", "claim": "runs"}


def parsed(**tables):
    return parse_experiment({"matrix": ONE, **tables}, name="e")


def test_without_a_table_slurm_has_defaults_and_kubernetes_nothing():
    experiment = parsed()
    site = experiment.slurm
    assert (site.at_once, site.partition, site.time_minutes, site.stop_s) == (16, None, 240, 120)
    assert (site.memory_mib, site.cpus, site.gpus) == (4096, None, 0)
    assert experiment.kubernetes is None


def test_where_cells_run_does_not_change_what_they_are():
    alone, there = parsed(), parsed(slurm={"gpus": 1, "memory": "9GB"}, kubernetes=POD)
    assert [cell.identity for cell in cells_of(alone).cells] == [
        cell.identity for cell in cells_of(there).cells
    ]


def test_memory_is_rounded_up_to_mebibytes():
    assert parsed(slurm={"memory": "1 GB"}).slurm.memory_mib == 954


def test_gpus_are_named_as_the_cells_mode_takes_them():
    assert parsed().slurm.gpu_flag("lockstep") is None
    assert parsed(slurm={"gpus": 1}).slurm.gpu_flag("lockstep") == "0"
    assert parsed(mode="cluster", slurm={"gpus": 3}).slurm.gpu_flag("cluster") == "all"


REFUSED = {
    "no table": ({"slurm": 3}, "slurm = 3 must be a table"),
    "an unknown key": ({"slurm": {"nodes": 2}}, "[slurm] has no key nodes; there are at_once"),
    "a number as a text": ({"slurm": {"partition": 1}}, "[slurm]: partition = 1 must be a text"),
    "two lines": ({"slurm": {"partition": "a\nb"}}, r"[slurm]: partition: 'a\nb' is not one line of text"),
    "no time": ({"slurm": {"time_minutes": 0}}, "[slurm]: time_minutes = 0 must be greater than 0"),
    "too little time": ({"slurm": {"time_minutes": 3}}, "time_minutes = 3 leaves no time to train"),
    "no size": ({"slurm": {"memory": "much"}}, "[slurm]: memory: 'much' is not a size such as \"512MiB\""),
    "no memory": ({"slurm": {"memory": "0GiB"}}, "[slurm]: memory: '0GiB' is no memory at all"),
    "a flag with dashes": ({"slurm": {"sbatch": {"--account": "a"}}}, "'--account' is no flag of sbatch"),
    "a flag of ours": ({"slurm": {"sbatch": {"array": "0-9"}}}, "array is not yours to set here"),
    "another cluster": (
        {"slurm": {"sbatch": {"clusters": "other"}}},
        "clusters is not to be set, for squeue does not show here what is queued there; run the command on",
    ),
    "another cluster by a short name": (
        {"slurm": {"sbatch": {"cluster": "other"}}},
        "cluster is not to be set",
    ),
    "another cluster by its features": (
        {"slurm": {"sbatch": {"cluster-constraint": "gpu"}}},
        "cluster-constraint is not to be set",
    ),
    "a flag that ends cells": ({"slurm": {"sbatch": {"no-requeue": True}}}, "no-requeue is not yours to set"),
    "a flag that is a list": ({"slurm": {"sbatch": {"qos": ["a"]}}}, "qos = ['a'] is neither true nor"),
    "several GPUs in one process": ({"slurm": {"gpus": 2}}, "[slurm]: gpus = 2, and a cell in lockstep"),
    "no claim's name": ({"kubernetes": {**POD, "claim": "C_D"}}, "claim: 'C_D' is no name of Kubernetes"),
    "no image": ({"kubernetes": {"claim": "c"}}, "[kubernetes] needs image: the image of the pods"),
}


@pytest.mark.parametrize(("tables", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_mistake_is_one_sentence(tables, said):
    with pytest.raises(ConfigError) as refused:
        parsed(**tables)
    assert_one_sentence(refused.value, said)
