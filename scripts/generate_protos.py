"""Generates the wire's code, in replay/wire/v1 and inference/v1, from protos/; run it after editing these.

Usage: python scripts/generate_protos.py [--out DIRECTORY]
"""

import argparse
import os
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> int:
    """Writes the message, service and stub modules below `out`; returns protoc's exit status.

    protoc looks for mypy-protobuf's plugins on PATH, and finds them beside this interpreter even
    where its virtual environment is not activated.
    """
    beside = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join((beside, os.environ.get("PATH", os.defpath)))
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    return int(
        protoc.main(
            [
                "protoc",
                f"-I{ROOT / 'protos'}",
                f"--python_out={out}",
                f"--grpc_python_out={out}",
                f"--mypy_out=quiet:{out}",
                f"--mypy_grpc_out=quiet:{out}",
                *(str(path) for path in protos),
            ]
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT)
    sys.exit(generate(parser.parse_args().out))
