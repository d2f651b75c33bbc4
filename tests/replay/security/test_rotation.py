"""Certificates that are replaced while nodes run."""

import asyncio
import shutil
from pathlib import Path

import pytest
from replay.security.credentials import MEMBER, guarded
from replay.wire.services import SCHEMA, eventually, promptly

from dase_grpc.errors import UnreachableError
from dase_grpc.progress import Progress
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.security.dialler import Credentials


def renewed(folder: Path, new: Path) -> None:
    """Puts the files of one folder into another, as `dase certs issue --replace` does."""
    for name in ("ca.crt", "tls.key", "tls.crt"):
        staged = folder / f"{name}.new"
        shutil.copy(new / name, staged)
        staged.replace(folder / name)


async def test_new_certificates_are_used_by_new_clients_and_the_next_call_while_open_streams_go_on(
    keyring, tmp_path
):
    """Both sides change to another authority while a learner's stream is open."""
    here, there = tmp_path / "replay", tmp_path / "learner"
    shutil.copytree(keyring.folder("replay"), here)
    shutil.copytree(keyring.folder("learner/3"), there)
    async with guarded(here) as guard, guard.as_caller(Credentials(there)) as caller:
        member = await caller.join(3)
        target = StreamTarget(caller.channel, caller.address, member, SCHEMA)
        inserter = await Inserter(target, writer_id="w").open()

        renewed(here, keyring.folder("replay", authority="other"))
        async with guard.as_caller(keyring.with_certificate("learner/4", authority="other")) as newcomer:
            assert (await newcomer.join(4)).agent_id == 4
        async with guard.as_caller(keyring.with_certificate("learner/5")) as left_behind:
            with pytest.raises(UnreachableError):
                await left_behind.cluster.heartbeat(MEMBER, Progress())

        renewed(there, keyring.folder("learner/3", authority="other"))
        await caller.cluster.heartbeat(member, Progress())  # on a new connection, with the new certificate
        rows = SCHEMA.empty(1)
        rows[:] = 0
        SCHEMA.agent_ids(rows)[:] = 3
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(inserter.receive())
            await inserter.append(rows)
            await promptly(inserter.finish())
        assert inserter.acknowledged_seq == 1


async def test_a_line_of_before_is_closed_once_its_last_call_has_ended(keyring, tmp_path):
    there = tmp_path / "learner"
    shutil.copytree(keyring.folder("learner/3"), there)
    async with guarded(keyring.folder("replay")) as guard, guard.as_caller(Credentials(there)) as caller:
        member = await caller.join(3)
        inserter = await Inserter(
            StreamTarget(caller.channel, caller.address, member, SCHEMA), writer_id="w"
        ).open()
        renewed(there, keyring.folder("learner"))
        await caller.cluster.heartbeat(member, Progress())
        closing = caller.channel._closing
        assert len(closing) == 1
        inserter.cancel()
        await eventually(lambda: not closing)


async def test_a_half_written_pair_leaves_the_old_one_in_use_and_is_said_once(keyring, tmp_path, caplog):
    here = tmp_path / "replay"
    shutil.copytree(keyring.folder("replay"), here)
    async with guarded(here) as guard:
        shutil.copy(keyring.folder("replay", authority="other") / "tls.key", here / "tls.key")
        for agent_id in (3, 4):
            async with guard.as_caller(keyring.with_certificate(f"learner/{agent_id}")) as caller:
                assert (await caller.join(agent_id)).agent_id == agent_id
    said = [record for record in caplog.records if "still in use" in record.getMessage()]
    assert len(said) == 1
    assert "PRIVATE" not in caplog.text


async def test_a_client_with_a_half_written_pair_goes_on_with_the_old_one(keyring, tmp_path):
    there = tmp_path / "learner"
    shutil.copytree(keyring.folder("learner/3"), there)
    async with guarded(keyring.folder("replay")) as guard, guard.as_caller(Credentials(there)) as caller:
        await caller.join(3)
        (there / "tls.crt").write_bytes(b"half a certi")
        await caller.cluster.status()
        (there / "tls.crt").unlink()
        await caller.cluster.status()
