"""What is computed from records, against brute force."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.lab import comparison, summary, tables
from lab_helpers import record

LOSSES = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=7)
FINALS = st.one_of(st.none(), st.floats(0.1, 4.0))


def grid(finals):
    """Runs at 0.1, 0.2, 0.4, … with these final losses of their seeds."""
    return {0.1 * 2**k: [record("sg", 0.1 * 2**k, [loss], seed) for seed, loss in enumerate(seeds)]
            for k, seeds in enumerate(finals)}  # fmt: skip


GRIDS = st.integers(1, 3).flatmap(
    lambda seeds: st.lists(st.lists(FINALS, min_size=seeds, max_size=seeds), min_size=1, max_size=6).map(grid)
)


@given(LOSSES, st.integers(1, 9))
def test_expected_best_of_k_is_the_mean_over_all_draws(losses, k):
    found = summary.expected_best(losses, k)
    if k > len(losses):
        assert found is None
    else:
        draws = [min(draw) for draw in itertools.combinations(losses, k)]
        assert found == pytest.approx(statistics.fmean(draws))


@given(GRIDS)
def test_best_stepsize_is_the_lowest_mean(runs):
    best = summary.best_stepsize(runs)
    means = {lr: statistics.fmean(map(summary.final_loss, found)) for lr, found in runs.items()}
    if math.isfinite(min(means.values())):
        assert means[best] == min(means.values())
    else:
        lost = {lr: sum(not math.isfinite(summary.final_loss(run)) for run in found) for lr, found in runs.items()}
        assert lost[best] == min(lost.values())


@given(GRIDS, st.sampled_from([0.05, 0.5, 2.0]))
def test_width_is_the_widest_interval_about_the_best_within_the_tolerance(runs, tolerance):
    found, best, rates = summary.width(runs, tolerance), summary.best_stepsize(runs), sorted(runs)
    limit = (1 + tolerance) * statistics.fmean(map(summary.final_loss, runs[best]))
    good = {lr: all(summary.final_loss(r) <= limit < math.inf for r in runs[lr]) for lr in rates}
    spans = [
        (low, high)
        for low in rates
        for high in rates
        if low <= best <= high and all(good[lr] for lr in rates if low <= lr <= high)
    ]
    if not spans:
        assert found == summary.Width(0.0, below=False, above=False)
    else:
        low, high = max(spans, key=lambda span: span[1] / span[0])
        assert found.decades == pytest.approx(math.log10(high / low))
        assert (found.below, found.above) == (low == rates[0], high == rates[-1])


def test_divergence_is_no_loss_or_more_than_at_first():
    for losses, l0 in (([2.0, 2.4], 2.3), ([2.0, None], None), ([None], 2.3)):
        assert summary.diverged(record("sg", 0.1, losses), l0)
    for losses, l0 in (([2.0, 1.0], 2.3), ([2.0, 2.4], None)):
        assert not summary.diverged(record("sg", 0.1, losses), l0)
    runs = [record("sg", lr, [loss]) for lr, loss in ((0.1, 1.0), (0.2, 3.0), (0.3, None), (0.4, 2.0))]
    assert summary.divergence_rate(runs, 2.5) == 0.5
    assert summary.scored(runs, 2.5) == [1.0, 2.5, 2.5, 2.0]
    assert summary.scored(runs, None) == [1.0, 3.0, 3.0, 2.0]
    assert summary.scored(runs[2:3], None) == [math.inf]


@given(st.lists(st.one_of(st.none(), st.floats(0.1, 3.0)), min_size=1, max_size=6), st.floats(0.1, 3.0))
def test_reach_is_the_end_of_the_first_epoch_at_the_target(losses, target):
    found = summary.reach(record("sg", 0.1, losses), target)
    hits = [k for k, loss in enumerate(losses, start=1) if loss is not None and loss <= target]
    first = hits[0] if hits else math.inf
    assert found == summary.Reach(first, 10 * first, pytest.approx(0.5 * first))


def test_steps_and_seconds_that_were_not_recorded_are_not_made_up():
    run = record("sg", 0.1, [2.0, 1.0])
    for row in run["metrics"]:
        del row["steps"], row["seconds"]
    assert summary.reach(run, 1.5) == summary.Reach(2, None, None)


@given(st.lists(st.lists(st.floats(0.001, 3.0), min_size=1, max_size=3), min_size=1, max_size=4))
def test_every_method_reaches_the_common_target(finals):
    found = summary.series(
        record(f"m{m}", 0.1, [5.0, loss], seed) for m, losses in enumerate(finals) for seed, loss in enumerate(losses)
    )
    target = summary.common_target(found)
    assert all(summary.reach(run, target).epochs == 2 for s in found for run in s.all_runs)
    worst = max(max(losses) for losses in finals)
    assert worst <= target <= 1.011 * worst


def test_what_ended_above_the_first_loss_counts_as_diverged_everywhere():
    l0, ends = math.log(10), (("sg", 1e6, 3.4), ("sg", 1e30, 2.307), ("adam", 0.1, 2.25), ("adam", 0.2, 2.31))
    found = summary.series(record(method, lr, [loss]) for method, lr, loss in ends)
    lost, good = (summary.summarize(s, l0, 2.2) for s in found)
    assert lost.losses == [math.inf] and lost.stepsize == 1e30, "the nearest to a result, where there is none"
    assert lost.width == summary.Width(0.0, below=False, above=False)
    assert good.width == summary.Width(0.0, below=True, above=False)
    assert summary.common_target(found, l0) == 2.25 and summary.common_target(found[:1], l0) is None


def test_series_split_by_options_and_keep_the_newest_of_a_run():
    old, new = record("sg", 0.1, [2.0]), record("sg", 0.1, [1.0])
    other = record("sg", 0.1, [3.0], options={"momentum": 0.9})
    plain, momentum = summary.series([record("sg", 0.2, [4.0]), old, new, other])
    assert list(plain.runs) == [0.1, 0.2] and plain.runs[0.1] == [new]
    assert momentum.options == {"momentum": 0.9} and momentum.all_runs == [other]


def test_summary_of_a_series():
    runs = [record("sg", lr, [2.0, loss], seed, accuracy=0.5 + 0.1 * seed) for lr, losses in
            ((0.1, (1.0, 1.2)), (0.2, (0.8, 0.9)), (0.4, (None, 2.0))) for seed, loss in enumerate(losses)]  # fmt: skip
    for run in runs:
        run["metrics"][-1]["dead_share"] = 0.25
    found = summary.summarize(summary.series(runs)[0], math.log(10), 0.9)
    assert (found.stepsize, found.at_edge, found.losses) == (0.2, False, [0.8, 0.9])
    assert found.loss == pytest.approx(0.85)
    assert (found.accuracies, found.dead_shares) == (pytest.approx([0.5, 0.6]), [0.25, 0.25])
    assert found.seconds_per_epoch == 0.5
    assert (found.divergence, found.divergence_at_best) == (pytest.approx(1 / 6), 0.0)
    assert found.expected_best[1] == pytest.approx(statistics.fmean([1.0, 1.2, 0.8, 0.9, math.log(10), 2.0]))
    assert found.expected_best[8] is None and found.reach.epochs == 2


def test_initial_loss_is_recorded_or_that_of_guessing():
    def initial_loss(**config):
        return summary.initial_loss([record("sg", 0.1, [1.0], **config)])

    assert initial_loss(data="CIFAR-10 (JPEG)") == math.log(10)
    assert initial_loss(data="my images", classes=200) == math.log(200)
    assert initial_loss(data="my images", initial_loss=4.5) == 4.5 and initial_loss(data="my images") is None


def test_markdown_takes_no_failed_run_for_a_result():
    runs = [("sg", 0.1, 2.5, 0), ("sg", 0.2, 2.4, 0), ("adam", 0.1, 0.5, 0), ("adam", 0.1, 0.7, 1)]
    found = comparison.compare([record(name, lr, [loss], seed) for name, lr, loss, seed in runs])
    lines = tables.markdown(found).splitlines()
    assert "| Adam | 0.1 | 0.600 ± 0.141 | 50.0 ± 0.0% | 0.0 ± 0.0% | 0.500 | 2 |" in lines
    assert "| SGD | 0.2 * | diverged | 50.0% | 0.0% | 0.500 | 1 |" in lines
