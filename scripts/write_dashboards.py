"""Writes deploy/grafana/dashboards from scripts/dashboards: `python scripts/write_dashboards.py [FOLDER]`."""

import json
import sys
from pathlib import Path
from typing import Final

from dashboards.distillation import distillation
from dashboards.followers import followers
from dashboards.learners import learners
from dashboards.overview import overview
from dashboards.replay import replay
from dashboards.serving import serving
from dashboards.similarity import similarity
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER: Final = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "dashboards"


def text_of(made: Dashboard) -> str:
    """A dashboard as Grafana reads it; its panels are numbered in their order."""
    built = made.build()
    for number, panel in enumerate(built.panels or [], start=1):
        panel.id_val = number
    return json.dumps(built, cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write(folder: Path) -> None:
    """Writes each dashboard to a file that is named after its uid."""
    folder.mkdir(parents=True, exist_ok=True)
    for made in (overview(), replay(), learners(), followers(), similarity(), distillation(), serving()):
        text = text_of(made)
        (folder / f"{json.loads(text)['uid']}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
