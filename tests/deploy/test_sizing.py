"""docs/sizing.md says what scripts/sizing.py computes from what was measured."""

import re

import sizing
from deploy.deployed import PROJECT

BEGIN, END = "<!-- begin: python scripts/sizing.py -->", "<!-- end -->"


def test_the_tables_of_the_page_are_what_the_script_prints(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["sizing.py"])
    sizing.main()
    page = (PROJECT / "docs" / "sizing.md").read_text(encoding="utf-8")
    assert page.split(BEGIN)[1].split(END)[0].strip() == capsys.readouterr().out.strip()


def test_the_measured_pieces_add_up_to_what_was_measured():
    costs = sizing.read_costs(sizing.RESULTS)
    text = (sizing.RESULTS / "throughput.md").read_text(encoding="utf-8")
    narrow, wide = (
        float(found) for found in re.findall(r"batches of 256 out \|[^|]*\|[^|]*\| ([\d.]+) \|", text)
    )
    for width, measured_us in (((17, 6), narrow), ((348, 17), wide)):
        load = sizing.Load(sizing.schema(*width).row_bytes, 1, 1.0, costs)
        assert abs(load.batch_s * 1e6 - measured_us) < 0.1
