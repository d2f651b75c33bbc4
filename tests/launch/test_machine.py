"""What a machine has room for, by what its system tells."""

import pytest

from dase_grpc.launch.storage import free_disk, free_memory


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:   2048 kB\n"}, 2 * 2**20),
        ({"meminfo": "MemAvailable: 2048 kB\n", "memory.max": "1048576\n"}, 2**20),
        ({"meminfo": "MemAvailable: 2048 kB\n", "memory.max": "max\n"}, 2 * 2**20),
        ({"meminfo": "MemAvailable: 2048 kB\n", "memory/memory.limit_in_bytes": "4096\n"}, 4096),
        ({"memory.max": "4096\n"}, 4096),
    ],
)
def test_available_memory_is_the_least_of_what_the_machine_has_left_and_a_container_may_have(
    tmp_path, told, expected
):
    for name, text in told.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(proc=tmp_path, cgroups=tmp_path) == expected


def test_where_nothing_is_told_there_is_all_that_the_machine_has(tmp_path):
    everything = free_memory(proc=tmp_path, cgroups=tmp_path)
    assert everything >= free_memory() > 0


def test_a_folder_that_is_not_there_yet_has_what_is_free_around_it(tmp_path):
    assert free_disk(tmp_path / "not" / "there") > 0
