"""Looks up known vulnerabilities of what is installed, and says of what it could not.

Usage: python scripts/audit.py PIP_AUDIT PYTHON: the tool, and the interpreter whose packages it looks at.
"""

import json
import subprocess
import sys
from typing import Any

NOT_LOOKED = 3


def main(pip_audit: str, python: str) -> int:
    """Runs the tool; 0 if nothing is known, 1 if something is, 3 if nothing could be looked up."""
    where = _output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    command = [pip_audit, "--path", where, "--skip-editable", "--format", "json", "--progress-spinner", "off"]
    answer = subprocess.run([*command, "--timeout", "15"], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(answer.stdout)["dependencies"]
    except ValueError:
        cause = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        print(f"not audited: the database of vulnerabilities does not answer here ({cause})")
        return NOT_LOOKED
    return report(packages)


def report(packages: list[dict[str, Any]]) -> int:
    """Prints what is known of packages, in the form of pip-audit's JSON."""
    for package in packages:
        for found in package.get("vulns", ()):
            remedy = ", ".join(found["fix_versions"]) or "none yet"
            print(f"{package['name']} {package['version']}: {found['id']}, fixed in {remedy}")
    unknown = [
        package["name"] for package in packages if "not found on PyPI" in package.get("skip_reason", "")
    ]
    vulnerable = sum(bool(package.get("vulns")) for package in packages)
    looked = len(packages) - sum("skip_reason" in package for package in packages)
    print(f"{looked} packages looked up, {vulnerable} with known vulnerabilities")
    if unknown:
        print(
            f"not audited: {len(unknown)} packages that the database, as this network shows it, does not know"
        )
    if vulnerable:
        return 1
    return 0 if looked else NOT_LOOKED


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
