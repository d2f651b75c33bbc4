"""Looks up known vulnerabilities of what is installed; tells them from a network that does not allow it.

Usage: python scripts/audit.py PIP_AUDIT PYTHON: the tool, and the interpreter whose packages it looks at.
"""

import subprocess
import sys

UNREACHABLE = (
    "ConnectionError",
    "Max retries exceeded",
    "Name or service not known",
    "ServiceError",
    "Tunnel",
)


def main(pip_audit: str, python: str) -> int:
    """Runs the tool; 0 if nothing is known, 1 if something is, 3 if it could not look."""
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    answer = subprocess.run(
        [pip_audit, "--path", where, "--skip-editable", "--progress-spinner", "off", "--timeout", "15"],
        capture_output=True,
        text=True,
        check=False,
    )
    told = answer.stdout + answer.stderr
    if answer.returncode and any(sign in told for sign in UNREACHABLE):
        print(f"not audited: the network here does not reach the database ({told.strip().splitlines()[-1]})")
        return 3
    print(told, end="")
    return answer.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
