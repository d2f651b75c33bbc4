"""The environment of processes that tests start."""

import os
from pathlib import Path


def importing(*folders: Path, **variables: str) -> dict[str, str]:
    """This process's environment, where modules are found in these folders too.

    PYTHONPATH as it is stays behind them: it may say which checkout is tested.
    """
    found = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found), **variables}
