import numpy as np
import pytest
import torch
from learning.lazy_lanes import World

from dase_grpc.learning.agents.batch import Lanes, Staging
from dase_grpc.schema import TransitionSchema

SCHEMA = TransitionSchema("a world", 3, 2, (-1.0, -1.0), (1.0, 1.0))
DEVICES = [
    torch.device("cpu"),
    pytest.param(
        torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


def rows(seed: int, count: int = 4):
    made = np.random.default_rng(seed).normal(size=(count, SCHEMA.width)).astype(np.float32)
    SCHEMA.agent_ids(made)[:] = np.arange(count)
    made[:, -1:].view(np.uint32)[:] = 2**31 + seed
    return made


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    return request.param


def test_a_batch_holds_every_column_bit_for_bit(device):
    given = rows(1)
    named, batch = SCHEMA.named(given), Staging(SCHEMA, 4, device).load(given)
    for name in ("observation", "action", "next_observation", "reward", "bootstrap", "agent_id"):
        assert np.array_equal(getattr(batch, name).cpu().numpy(), named[name]), name
    assert np.array_equal(batch.policy_version.cpu().numpy().view(np.uint32), named["policy_version"])
    assert batch.observation.device.type == device.type


def test_rows_may_be_read_only_and_are_copied(device):
    given = rows(1)
    kept = given.copy()
    given.flags.writeable = False
    batch = Staging(SCHEMA, 4, device).load(given)
    given.flags.writeable = True
    given[:] = 0
    assert np.array_equal(batch.observation.cpu().numpy(), kept[:, :3])


def test_the_batch_is_reused_so_that_no_update_allocates(device):
    staging = Staging(SCHEMA, 4, device)
    first = staging.load(rows(1))
    second = staging.load(rows(2))
    assert second is first
    assert np.array_equal(first.action.cpu().numpy(), rows(2)[:, 3:5])


def test_a_load_does_not_overtake_work_on_the_batch_before(device):
    staging = Staging(SCHEMA, 4, device)
    sums = [staging.load(rows(seed)).observation.sum() for seed in range(50)]
    assert [float(total) for total in sums] == pytest.approx(
        [float(rows(seed)[:, :3].sum()) for seed in range(50)], rel=1e-4, abs=1e-4
    )


# As on a GPU: copies that happen late and out of order (lazy_lanes.py)


@pytest.mark.parametrize("seed", range(20))
def test_every_update_reads_its_own_batch_however_late_and_out_of_order_copies_happen(seed):
    world = World(seed)
    upload, compute = world.lane(), world.lane()
    staging = Staging(SCHEMA, 4, torch.device("cpu"), lanes=Lanes(upload, compute))
    read = []
    for number in range(30):
        given = rows(number)
        staging.load(given)
        given[:] = 0  # the caller's again
        for _ in range(2):  # what an update does twice, at its beginning and its end
            compute.do(lambda: read.append(staging.batch.policy_version.clone()))
    world.finish()
    versions = [int(version[0]) & 0xFFFF_FFFF for version in read]
    assert versions == [2**31 + number for number in range(30) for _ in range(2)]


def test_the_host_queues_two_loads_before_it_waits_for_anything():
    world = World(0)
    world.drift = lambda: None
    staging = Staging(SCHEMA, 4, torch.device("cpu"), lanes=Lanes(world.lane(), world.lane()))
    for number in range(2):
        staging.load(rows(number))
    assert world.waits == 0
    staging.load(rows(2))
    assert world.waits == 1
