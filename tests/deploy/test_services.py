"""The services of docs/hosts.md: what a reader copies makes all that the units of systemd read, as theirs."""

import re

import pytest
from children import ran
from deploy.deployed import DEPLOY, PROJECT

PAGE = (PROJECT / "docs" / "hosts.md").read_text(encoding="utf-8")
ELSEWHERE = ("useradd", "chown", "systemctl")
"""Commands that would change this machine; here they only say that they were called."""


def blocks(section):
    """The commands of a section of the page, block by block."""
    (text,) = re.findall(rf"^## {re.escape(section)}$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"```console\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(("block", "unit"), [(0, "dase-replay.service"), (1, "dase-learner@.service")])
def test_what_is_copied_makes_all_that_a_service_reads_and_gives_it_to_its_user_last(block, unit, tmp_path):
    for folder in ("replay", "learner-0", "metrics-tls", "etc/systemd/system"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run.toml").touch()
    (tmp_path / "deploy").symlink_to(DEPLOY)
    commands = blocks("10. As services")[block].replace("/etc/", "etc/")
    spoken = "\n".join(f'{each}() {{ echo {each} "$@"; }}' for each in ELSEWHERE)
    told = ran("bash", "-euc", f"{spoken}\n{commands}", cwd=tmp_path, check=True).stdout.splitlines()
    assert told[0] == "useradd --system dase"
    assert "chown -R dase etc/dase" in told
    service = (tmp_path / "etc/systemd/system" / unit).read_text(encoding="utf-8").replace("%i", "0")
    read = set(re.findall(r"/etc/dase/[\w/-]+(?:\.\w+)?", service + commands.replace("etc/", "/etc/")))
    assert [path for path in sorted(read) if not (tmp_path / path[1:]).exists()] == []
    assert "etc/dase" not in commands.partition("chown -R dase etc/dase")[2]


def test_the_firewall_lets_in_what_the_table_of_ports_names():
    table = {
        port
        for ports in re.findall(r"^\| 10\S+ \| ([\d, ]+) \|", PAGE, re.MULTILINE)
        for port in ports.split(", ")
    }
    (text,) = re.findall(r"^## 4\. Ports$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    _, _, said = text.partition("With firewalld")
    assert table == set(re.findall(r"\b9\d{3}\b|\b50051\b", said))
