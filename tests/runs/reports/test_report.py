"""The HTML report, from full, partial and empty runs."""

import re
from math import inf, nan

import pytest
from pages import sound

from dase_grpc.config.resolve import resolve
from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.reference import comparable
from dase_grpc.runs.reports.figures import PALETTE, thousands
from dase_grpc.runs.reports.html import number, weight_text
from dase_grpc.runs.reports.plots import divergence_terms
from dase_grpc.runs.reports.report import method, write_report

FULL = """TD3 with K = 2 agents, DASE
mean over agents
955.0
centred moving average over 25 evaluations
published: dase-k2
5,514 ± 310
own 15/30
combination
a comparison, not a target
from agent 1
weight used
a diagnostic that weighs nothing
λ = 0.01
updates per second
capacity = 100000
external transitions have 12 % of the loss weight
a batch of 256 counts as 140.5 transitions
external share of the loss weight"""
"""What the page of a full run says; 955.0 is the mean of the evaluations 910 ... 1000."""


def make_run(root, settings=None, *filled, mode="cluster"):
    """A run whose agents have so many evaluations and records each: `filled` are these pairs."""
    base = {"env": {"id": "HalfCheetah-v5"}, "replay": {"capacity": 100_000}}
    run = RunDirectory.create(root, "run", resolve(base, settings or {}), mode=mode, command=["dase"])
    for agent, (evaluations, records) in enumerate(filled):
        for index in range(evaluations):
            evaluate(run, agent, index, index * 10.0)
        for index in range(records):
            run.agent(agent).metrics.append(record(agent, index, agents=len(filled)))
    return run


def evaluate(run, agent, index, mean):
    run.agent(agent).evaluations.append(
        step=index * 1000, return_mean=mean, return_std=1.0, episodes=10, wall_seconds=index
    )


def record(agent, index, *, agents):
    return {
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
        "effective_batch": 140.0 + agent,
    }


def text_of(run):
    path = write_report(run)
    assert path == run.report
    return sound(path.read_text(encoding="utf-8"))


def tile(text, name):
    """What a tile of the page says."""
    (said,) = re.findall(rf"<dt>{re.escape(name)}</dt><dd>(.*?)</dd>", text)
    return said


def row_of(text, name):
    """The cells of the row with this name."""
    (cells,) = re.findall(rf'<tr><th scope="row" class="words">{re.escape(name)}</th>(.*?)</tr>', text)
    return re.findall(r"<td>(.*?)</td>", cells)


@pytest.mark.slow
def test_a_full_run_shows_curves_scores_similarity_and_throughput_and_the_same_again(tmp_path):
    run = make_run(tmp_path, None, (101, 100), (101, 100))
    text = text_of(run)
    assert text.count("<svg") == 7
    assert [line for line in FULL.splitlines() if line not in text] == []
    assert 'class="empty"' not in text
    assert row_of(text, "mean over agents") == ["1,000.0", "955.0", "0.0", "–", ""]  # bests have no mean
    assert text_of(run) == text
    assert not list(run.path.glob(".staging*"))


@pytest.mark.slow
def test_a_pair_that_distils_shows_its_distillation_and_no_similarity(tmp_path):
    run = make_run(tmp_path, {"train": {"method": "dpd"}, "dpd": {"distil_every": 2}}, (3, 2), (3, 2))
    distilled = {"step": 3000, "distilled_share": 0.5, "confidence": 2.0, "similarity": {}}
    for agent in range(2):
        run.agent(agent).metrics.append({**distilled, "refused_policies": 2})
    text = text_of(run)
    assert "disadvantageous states, α = 0.75, every 2 updates" in text
    assert "Similarity" not in text.partition("How this run was made")[0]
    assert "share of states" in text
    assert "4 policies of peers held numbers that are not finite" in text


def test_a_pair_that_has_not_distilled_yet_says_so(tmp_path):
    run = make_run(tmp_path, {"train": {"method": "dpd"}}, (1, 0))
    assert "No distillation has been recorded yet." in text_of(run)


@pytest.mark.slow
def test_the_agents_of_a_mixed_ensemble_are_shown_with_their_algorithms(tmp_path):
    members = {"members": [{"algorithm": "td3"}, {"algorithm": "sac"}]}
    text = text_of(make_run(tmp_path, members, (3, 2), (3, 2)))
    assert '<th scope="row" class="words">agent 1 (SAC)</th>' in text
    for title in ("Learning curves", "Training"):
        drawn = text.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]
        assert "agent 0 (TD3)" in drawn
        assert "agent 1 (SAC)" in drawn


def test_an_empty_run_says_so_in_sentences(tmp_path):
    text = text_of(make_run(tmp_path))
    assert "<svg" not in text
    assert text.count('class="empty"') == 8
    assert "There is no learning curve yet: no evaluation has been recorded." in text
    assert "5,514 ± 310" in text
    assert "refused" not in text


@pytest.mark.parametrize("evaluations", [1, 2, 49])
@pytest.mark.slow
def test_a_short_run_is_not_smoothed_away(tmp_path, evaluations):
    text = text_of(make_run(tmp_path, None, (evaluations, 1), (1, 0)))
    assert "Not smoothed" in text
    assert "published: single" not in text


@pytest.mark.slow
def test_a_run_killed_while_writing_still_has_a_report(tmp_path):
    run = make_run(tmp_path, None, (3, 3), (0, 0))
    for file in (run.agent(0).evaluations.path, run.agent(0).metrics.path):
        file.write_bytes(file.read_bytes()[:-7])
    assert text_of(run).count("<svg") == 7


def test_numbers_that_are_not_finite_or_not_positive_draw_gaps(tmp_path):
    run = make_run(tmp_path)
    for index, mean in enumerate((nan, -inf, 1.0, nan)):
        evaluate(run, 0, index, mean)
    odd = {"similarity": {"1": 0.0}, "divergence_covariance": 0, "divergence_mean": nan}
    for step in (0, 1000):
        run.agent(0).metrics.append({"step": step, **odd})
    text = text_of(run)
    assert ">0</td>" in text
    assert "–" in text


@pytest.mark.parametrize("agents", [1, 10, 12])
@pytest.mark.slow
def test_any_number_of_agents_fits(tmp_path, agents):
    text = text_of(make_run(tmp_path, {"train": {"agents": agents}}, *[(60, 4)] * agents))
    assert ("One agent has no peers" in text) == (agents == 1)
    assert (">agent 9<" in text) == (agents >= 10)
    assert ("for each collecting agent" in text) == (agents > 2)


@pytest.mark.slow
def test_the_terms_of_each_source_are_drawn_where_there_are_several(tmp_path):
    run = make_run(tmp_path, {"train": {"agents": 3}}, *[(2, 4)] * 3)
    text = text_of(run)
    assert text.count("<svg") == 8
    assert "terms of ρ (nats)" in text
    for agent in range(3):
        metrics = run.agent(agent).metrics.path
        metrics.write_text('{"step": 1, "divergence_mean_by_source": {"0": 0.0, "1": 0.0}}\n')
    assert "No term of a single agent has been recorded yet." in text_of(run)


def test_what_a_user_wrote_is_escaped(tmp_path):
    env = {"id": "<script>alert(1)</script>:X", "kwargs": {"a": "</pre><b>&"}}
    text = text_of(make_run(tmp_path, {"env": env, "train": {"agents": 1}}))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;:X" in text
    assert "&lt;/pre&gt;&lt;b&gt;&amp;" in text


def test_a_damaged_file_is_one_sentence(tmp_path):
    run = make_run(tmp_path, None, (1, 0))
    run.agent(0).evaluations.path.write_text("x\n")
    with pytest.raises(RunDirectoryError, match=r"evaluations\.csv is damaged"):
        write_report(run)


def test_nothing_published_is_shown_for_a_changed_environment_or_a_size_in_bytes():
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
def test_the_method_is_named_in_words(settings, words):
    assert words in method(resolve(settings))


@pytest.mark.parametrize(
    ("write", "values", "texts"),
    [
        (thousands, (0, 500, 1500, 100_000, 2_000_000), "0 500 1.5k 100k 2M"),
        (number, (1234.56, -0.5, None, nan, -2e300), "1,234.6 −0.5 – – −2.000e+300"),
        (weight_text, (0.0, 1.0, 0.4242, 0.01, 3.2e-5), "0 1 0.42 0.01 3e−05"),
    ],
)
def test_numbers_are_short_and_readable(write, values, texts):
    assert list(map(write, values)) == texts.split()


def test_the_palette_has_no_colour_twice():
    assert len(set(PALETTE)) == len(PALETTE)


@pytest.mark.slow
def test_a_short_run_shows_its_last_score_and_no_final_one(tmp_path):
    """Of 45 evaluations 19 follow step 25,000, of 46 one more."""
    settings = {"train": {"agents": 2}, "agent": {"start_steps": 25_000}}
    text = text_of(make_run(tmp_path, settings, (45, 1), (46, 1)))
    assert row_of(text, "agent 0") == ["440.0", "–", "0.0", "440.0", "45"]
    assert row_of(text, "agent 1") == ["450.0", "405.0", "0.0", "450.0", "46"]
    assert "once 20 evaluations follow the 25,000 random steps" in text


def test_small_scores_have_the_same_decimals_in_all_rows(tmp_path):
    run = make_run(tmp_path)
    for agent, mean in enumerate((-0.5, 0.125)):
        evaluate(run, agent, 0, mean)
    text = text_of(run)
    assert (row_of(text, "agent 0")[0], row_of(text, "agent 1")[0]) == ("−0.500", "0.125")


def test_versions_are_shown_once_and_an_empty_command_not_at_all(tmp_path):
    silent = RunDirectory.create(tmp_path, "silent", resolve({}), mode="lockstep")
    text = text_of(silent)
    assert text.count(">torch<") == 1
    assert "<dt>Command</dt>" not in text
    assert tile(text, "Mode") == "lockstep (reproducible)"
    text = text_of(make_run(tmp_path))
    assert (tile(text, "Command"), tile(text, "Mode")) == ("dase", "cluster (depends on timing)")


def test_refused_transitions_are_counted(tmp_path):
    run = make_run(tmp_path)
    run.agent(0).metrics.append({"step": 1000, "refused": {"reward": 3}})
    run.agent(1).metrics.append({"step": 1000, "refused": {"reward": 1_000, "observation": 2}})
    text = text_of(run)
    assert "1,005 transitions were refused" in text
    assert "2 for the observation, 1,003 for the reward." in text


def test_curves_without_a_finite_number_are_a_sentence(tmp_path):
    run = make_run(tmp_path)
    for index in (0, 1):
        evaluate(run, 0, index, nan)
    assert "no evaluation returned a finite number" in text_of(run)


def test_numbers_too_large_to_draw_are_left_out_of_pictures_and_counted(tmp_path):
    run = make_run(tmp_path, None, (3, 0), (0, 0))
    for agent, mean in ((0, 1e308), (1, 1e308), (1, -1.7e308)):
        for index in range(20):
            evaluate(run, agent, 3 + index, mean)
    keys = (
        "step",
        "critic_loss",
        "q_mean",
        "buffer_size",
        "effective_batch",
        "divergence_mean",
        "similarity_weight",
    )
    for agent in (0, 1):
        run.agent(agent).metrics.append({**dict.fromkeys(keys, 1e308), "step": 5, "q_mean": -1.6e308})
    text = text_of(run)
    assert row_of(text, "agent 0")[:1] == ["1.000e+308"]
    assert "for numbers beyond ±1e+100 cannot be drawn: 2 of buffer_size, 2 of critic_loss," in text
    assert "60 of return_mean" in text
    empty = make_run(tmp_path / "all", None, (0, 0))
    evaluate(empty, 0, 0, 1e308)
    assert "no evaluation returned a finite number within ±1e+100" in text_of(empty)


@pytest.mark.parametrize(
    ("lowest", "highest"), [(0.15, 0.2), (5.0, 5.0), (0.9, 1.1), (1e-12, 1e14), (5e-324, 1e308)]
)
def test_a_logarithmic_axis_has_at_least_two_labels(lowest, highest):
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
def test_the_page_says_what_weighs_in_each_scope(tmp_path, scope, words):
    text = text_of(make_run(tmp_path, {"dps": {"scope": scope}}, (1, 4), (0, 0)))
    assert words in text
    assert "weighs nothing" not in text
