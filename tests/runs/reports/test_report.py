"""The HTML report, from full, partial and empty runs."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from dase_grpc.config.resolve import resolve
from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.directory import AgentDirectory, RunDirectory
from dase_grpc.runs.reference import comparable
from dase_grpc.runs.reports.figures import PALETTE, thousands
from dase_grpc.runs.reports.html import number, weight_text
from dase_grpc.runs.reports.plots import divergence_terms
from dase_grpc.runs.reports.report import method, write_report

VOID = {"meta", "link", "br", "img", "hr"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed and not open, or that stays open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def make_run(root: Path, settings: dict[str, Any] | None = None) -> RunDirectory:
    base = {"env": {"id": "HalfCheetah-v5"}, "replay": {"capacity": 100_000}}
    return RunDirectory.create(root, "run", resolve(base, settings or {}), mode="cluster", command=["dase"])


def fill(agent: AgentDirectory, *, evaluations: int, records: int, agents: int = 2) -> None:
    for index in range(evaluations):
        agent.evaluations.append(
            step=index * 1000, return_mean=index * 10.0, return_std=1.0, episodes=10, wall_seconds=index
        )
    for index in range(records):
        agent.metrics.append(
            {
                "step": index * 1000,
                "updates_per_second": 100.0,
                "steps_per_second": 110.0,
                "critic_loss": 0.5,
                "q_mean": 3.0,
                "buffer_size": index * 1000 * agents,
                "similarity": {str(source): 10.0 ** -(source + 1) for source in range(agents)},
                "similarity_weight": 1e-3,
                "divergence_covariance": 5.0,
                "divergence_mean": 0.0,
                "divergence_covariance_by_source": {str(source): 4.0 + source for source in range(agents)},
                "divergence_mean_by_source": {str(source): 0.5 for source in range(agents)},
                "external_share": 0.125,
                "effective_batch": 140.0 + agent.agent_id,
            }
        )


def text_of(run: RunDirectory) -> str:
    path = write_report(run)
    assert path == run.report
    text = path.read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)
    return text


@pytest.mark.slow
def test_a_full_run_shows_curves_scores_similarity_and_throughput(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for agent in range(2):
        fill(run.agent(agent), evaluations=101, records=100)
    text = text_of(run)
    assert text.count("<svg") == 7
    for expected in (
        "TD3 with K = 2 agents, DASE",
        "mean over agents",
        "955.0",  # of the evaluations 910 ... 1000
        "centred moving average over 25 evaluations",
        "published: dase-k2",
        "5,514 ± 310",
        "own 15/30",
        "combination",
        "a comparison, not a target",
        "from agent 1",
        "weight used",
        "a diagnostic that weighs nothing",
        "λ = 0.01",
        "updates per second",
        "capacity = 100000",
        "external transitions have 12 % of the loss weight",
        "a batch of 256 counts as 140.5 transitions",
        "external share of the loss weight",
    ):
        assert expected in text, expected
    assert 'class="empty"' not in text


def test_a_pair_that_distils_shows_its_distillation_and_no_similarity(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"train": {"method": "dpd"}, "dpd": {"distil_every": 2}})
    for agent in range(2):
        fill(run.agent(agent), evaluations=3, records=2)
        run.agent(agent).metrics.append(
            {"step": 3000, "distilled_share": 0.5, "confidence": 2.0, "similarity": {}, "refused_policies": 2}
        )
    text = text_of(run)
    assert "disadvantageous states, α = 0.75, every 2 updates" in text
    assert "Similarity" not in text.partition("How this run was made")[0]
    assert "share of states" in text
    assert "4 policies of peers held numbers that are not finite" in text


def test_a_pair_that_has_not_distilled_yet_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"train": {"method": "dpd"}})
    fill(run.agent(0), evaluations=1, records=0)
    assert "No distillation has been recorded yet." in text_of(run)


@pytest.mark.slow
def test_the_agents_of_a_mixed_ensemble_are_shown_with_their_algorithms(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"members": [{"algorithm": "td3"}, {"algorithm": "sac"}]})
    for agent in range(2):
        fill(run.agent(agent), evaluations=3, records=2)
    text = text_of(run)
    assert '<th scope="row" class="words">agent 1 (SAC)</th>' in text
    curves, training = (
        text.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]
        for title in ("Learning curves", "Training")
    )
    for drawn in (curves, training):
        assert "agent 0 (TD3)" in drawn
        assert "agent 1 (SAC)" in drawn


@pytest.mark.slow
def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run.agent(0), evaluations=60, records=5)
    text = text_of(run)
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"(src|href)=\"(?!#|data:)|url\((?!#)|@import|<script", text)


@pytest.mark.slow
def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run.agent(0), evaluations=60, records=5)
    assert text_of(run) == text_of(run)
    assert not list(run.path.glob(".staging*"))


def test_an_empty_run_says_so_in_sentences(tmp_path: Path) -> None:
    text = text_of(make_run(tmp_path))
    assert "<svg" not in text
    assert text.count('class="empty"') == 8
    assert "There is no learning curve yet: no evaluation has been recorded." in text
    assert "5,514 ± 310" in text


@pytest.mark.parametrize("evaluations", [1, 2, 49])
@pytest.mark.slow
def test_a_short_run_is_not_smoothed_away(tmp_path: Path, evaluations: int) -> None:
    run = make_run(tmp_path)
    fill(run.agent(0), evaluations=evaluations, records=1)
    fill(run.agent(1), evaluations=1, records=0)
    text = text_of(run)
    assert "Not smoothed" in text
    assert "published: single" not in text


@pytest.mark.slow
def test_a_run_killed_while_writing_still_has_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run.agent(0), evaluations=3, records=3)
    for file in (run.agent(0).evaluations.path, run.agent(0).metrics.path):
        file.write_bytes(file.read_bytes()[:-7])
    assert text_of(run).count("<svg") == 7


def test_numbers_that_are_not_finite_or_not_positive_draw_gaps(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    agent = run.agent(0)
    for index, mean in enumerate((np.nan, -np.inf, 1.0, np.nan)):
        agent.evaluations.append(
            step=index * 1000, return_mean=mean, return_std=np.nan, episodes=10, wall_seconds=0
        )
    for step in (0, 1000):
        agent.metrics.append(
            {"step": step, "similarity": {"1": 0.0}, "divergence_covariance": 0, "divergence_mean": np.nan}
        )
    text = text_of(run)
    assert ">0</td>" in text
    assert "–" in text


@pytest.mark.parametrize("agents", [1, 10, 12])
@pytest.mark.slow
def test_any_number_of_agents_fits(tmp_path: Path, agents: int) -> None:
    run = make_run(tmp_path, {"train": {"agents": agents}})
    for agent in range(agents):
        fill(run.agent(agent), evaluations=60, records=4, agents=agents)
    text = text_of(run)
    assert ("One agent has no peers" in text) == (agents == 1)
    assert (">agent 9<" in text) == (agents >= 10)
    assert ("for each collecting agent" in text) == (agents > 2)


@pytest.mark.slow
def test_the_terms_of_each_source_are_drawn_where_there_are_several(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"train": {"agents": 3}})
    for agent in range(3):
        fill(run.agent(agent), evaluations=2, records=4, agents=3)
    text = text_of(run)
    assert text.count("<svg") == 8
    assert "terms of ρ (nats)" in text
    for agent in range(3):
        run.agent(agent).metrics.path.write_text(
            '{"step": 1, "divergence_mean_by_source": {"0": 0.0, "1": 0.0}}\n'
        )
    assert "No term of a single agent has been recorded yet." in text_of(run)


def test_what_a_user_wrote_is_escaped(tmp_path: Path) -> None:
    settings = {"env": {"id": "<script>alert(1)</script>:X", "kwargs": {"a": "</pre><b>&"}}}
    run = make_run(tmp_path, {**settings, "train": {"agents": 1}})
    text = text_of(run)
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;:X" in text
    assert "&lt;/pre&gt;&lt;b&gt;&amp;" in text


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run.agent(0), evaluations=1, records=0)
    run.agent(0).evaluations.path.write_text("x\n")
    with pytest.raises(RunDirectoryError, match=r"evaluations\.csv is damaged"):
        write_report(run)


def test_nothing_published_is_shown_for_a_changed_environment_or_a_size_in_bytes() -> None:
    base = {"env": {"id": "Ant-v5"}, "replay": {"capacity": 100_000}}
    assert comparable(resolve(base))
    assert not comparable(resolve(base, {"env": {"kwargs": {"healthy_reward": 0}}}))
    assert not comparable(resolve(base, {"replay": {"capacity": "512MiB"}}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": {"agents": 1}}, "TD3, one agent"),
        ({"dps": {"divergence": "none"}}, "experience sharing without correction (λ = 1)"),
        ({"dps": {"divergence": "isolated"}}, "isolated agents on one buffer (λ = 0)"),
        ({"dps": {"divergence": "kl"}}, "DASE with the KL divergence"),
    ],
)
def test_the_method_is_named_in_words(settings: dict[str, Any], words: str) -> None:
    assert words in method(resolve(settings))


def test_numbers_are_short_and_readable() -> None:
    assert [thousands(value) for value in (0, 500, 1500, 100_000, 2_000_000)] == [
        "0",
        "500",
        "1.5k",
        "100k",
        "2M",
    ]
    assert [number(value) for value in (1234.56, -0.5, None, np.nan)] == ["1,234.6", "−0.5", "–", "–"]
    assert [weight_text(value) for value in (0.0, 1.0, 0.4242, 0.01, 3.2e-5)] == [
        "0",
        "1",
        "0.42",
        "0.01",
        "3e−05",
    ]


def test_the_palette_has_no_colour_twice() -> None:
    assert len(set(PALETTE)) == len(PALETTE)


def tile(text: str, name: str) -> str:
    """What a tile of the page says."""
    (said,) = re.findall(rf"<dt>{re.escape(name)}</dt><dd>(.*?)</dd>", text)
    return said


def row_of(text: str, name: str) -> list[str]:
    """The cells of the row with this name."""
    (cells,) = re.findall(rf'<tr><th scope="row" class="words">{re.escape(name)}</th>(.*?)</tr>', text)
    return re.findall(r"<td>(.*?)</td>", cells)


@pytest.mark.slow
def test_a_short_run_shows_its_last_score_and_no_final_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"train": {"agents": 1}, "agent": {"start_steps": 25_000}})
    fill(run.agent(0), evaluations=45, records=1)  # 19 of them follow step 25,000
    text = text_of(run)
    assert row_of(text, "agent 0") == ["440.0", "–", "0.0", "440.0", "45"]
    assert "once 20 evaluations follow the 25,000 random steps" in text
    fill(run.agent(1), evaluations=46, records=1)
    text = text_of(run)
    assert row_of(text, "agent 1") == ["450.0", "405.0", "0.0", "450.0", "46"]


@pytest.mark.slow
def test_the_mean_over_agents_leaves_out_the_best(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for agent in range(2):
        fill(run.agent(agent), evaluations=60, records=1)
    assert row_of(text_of(run), "mean over agents") == ["590.0", "545.0", "0.0", "–", ""]


def test_small_scores_have_the_same_decimals_in_all_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for agent, mean in enumerate((-0.5, 0.125)):
        run.agent(agent).evaluations.append(
            step=0, return_mean=mean, return_std=0, episodes=1, wall_seconds=0
        )
    text = text_of(run)
    assert row_of(text, "agent 0")[0] == "−0.500"
    assert row_of(text, "agent 1")[0] == "0.125"


def test_versions_are_shown_once_and_an_empty_command_not_at_all(tmp_path: Path) -> None:
    config = resolve({"env": {"id": "HalfCheetah-v5"}})
    silent = RunDirectory.create(tmp_path, "silent", config, mode="lockstep")
    text = text_of(silent)
    assert text.count(">torch<") == 1
    assert "<dt>Command</dt>" not in text
    assert tile(text, "Mode") == "lockstep (reproducible)"
    text = text_of(make_run(tmp_path))
    assert tile(text, "Command") == "dase"
    assert tile(text, "Mode") == "cluster (depends on timing)"


def test_refused_transitions_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "refused" not in text_of(run)
    run.agent(0).metrics.append({"step": 1000, "refused": {"reward": 3}})
    run.agent(1).metrics.append({"step": 1000, "refused": {"reward": 1_000, "observation": 2}})
    assert "1,005 transitions were refused" in text_of(run)
    assert "2 for the observation, 1,003 for the reward" in text_of(run)


def test_curves_without_a_finite_number_are_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (0, 1000):
        run.agent(0).evaluations.append(
            step=step, return_mean=np.nan, return_std=np.nan, episodes=1, wall_seconds=0
        )
    assert "no evaluation returned a finite number" in text_of(run)


@pytest.mark.parametrize(
    ("lowest", "highest"), [(0.15, 0.2), (5.0, 5.0), (0.9, 1.1), (1e-12, 1e14), (5e-324, 1e308)]
)
def test_a_logarithmic_axis_has_at_least_two_labels(lowest: float, highest: float) -> None:
    records = [
        {"step": step, "divergence_covariance": value, "divergence_mean": value}
        for step, value in enumerate((lowest, highest))
    ]
    picture = divergence_terms({0: records})
    assert picture is not None
    ticks = picture[picture.index('id="matplotlib.axis_2"') : picture.index('id="axes_2"')]
    assert 2 <= ticks.count('id="ytick_') <= 6


@pytest.mark.parametrize(
    ("scope", "words"), [("agent", "which is what weighs"), ("transition", "by themselves, their mean")]
)
@pytest.mark.slow
def test_the_page_says_what_weighs_in_each_scope(tmp_path: Path, scope: str, words: str) -> None:
    run = make_run(tmp_path, {"dps": {"scope": scope}})
    fill(run.agent(0), evaluations=1, records=4)
    text = text_of(run)
    assert words in text
    assert "weighs nothing" not in text
