"""The paper's experiments: each one's quick run from end to end, resumption, and the mathematics in them."""

import copy
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.nn import functional

import evenstep
from data_files import write_cifar, write_idx, write_images, write_text
from evenstep.lab import identity, records, reproduce, reproduction, sweep
from evenstep.lab.experiments import EXPERIMENTS, Options, Session, coupling, fig1, fig2, fig3, l2, scale, shock, tuning
from evenstep.lab.experiments import session as sessions
from evenstep.lab.experiments.session import finished, images, kept
from evenstep.lab.methods import METHODS
from evenstep.lab.models import L2Term
from evenstep.lab.usage import UsageError
from helpers import classify, descend, twins
from lab_helpers import record, without_seconds

QUICK = Options(quick=True)
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "reproduction"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A folder with the records of every experiment's quick run."""
    out = tmp_path_factory.mktemp("records")
    assert reproduce.reproduce(list(EXPERIMENTS), QUICK, out) == []
    return out


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_quick_run_gives_records_a_figure_a_table_and_a_verdict_as_a_part_of_it_does(quick, name):
    experiment, found = EXPERIMENTS[name], finished(quick / f"{name}.jsonl")
    assert found and all(json.dumps(r, allow_nan=False) for r in found)
    for part in (found, found[:1], found[:2], found[:-1], found[1:]):
        verdicts = [claim.judge(part) for claim in experiment.CLAIMS]
        (head, *rows), axes = experiment.table(part), experiment.plot(part).axes
        assert all(text for _, text in verdicts) and all(len(row) == len(head) for row in rows)
        if part is found:
            assert rows and all(len(text) > 40 and held in (True, False, None) for held, text in verdicts)
            assert all(panel.lines or panel.collections for panel in axes)
            ticks = [tick for panel in axes if panel.get_xlabel() == "epoch" for tick in panel.get_xticks()]
            assert all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize("name", ["fig3", "coupling", "shock"])
def test_a_stopped_run_goes_on_where_it_stopped(quick, tmp_path, name):
    path, whole = tmp_path / "records.jsonl", finished(quick / f"{name}.jsonl")
    calls = []

    def stop_at_second(*what):
        calls.append(what)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EXPERIMENTS[name].run(Session(QUICK, path, "cpu", stop_at_second))
    part = finished(path)
    assert 0 < len(part) < len(whole)
    with path.open("ab") as file:
        file.write(b'{"config": {"half a rec')
    with pytest.warns(UserWarning, match="was not written whole; it was moved to"):
        EXPERIMENTS[name].run(Session(QUICK, path))
    now = finished(path)
    assert now[: len(part)] == part and len(now) == len(whole)
    for one, other in zip(now, whole, strict=True):
        assert one["config"] == other["config"]
        assert without_seconds(one["metrics"]) == without_seconds(other["metrics"])
    assert list(EXPERIMENTS[name].run(Session(QUICK, path))) == now == finished(path), "all is there"


def test_records_of_other_data_are_refused(tmp_path):
    path = tmp_path / "l2.jsonl"
    records.append(path, records.make({"method": "sg", "data": "something else"}, 0, []))
    with pytest.raises(UsageError, match=r"l2\.jsonl holds records on something else, this run is on Fashion"):
        l2.run(Session(QUICK, path))


def of(data, record):
    """A record as if it were of other data."""
    return {**record, "config": {**record["config"], **data}} if "data" in record["config"] else record


@pytest.mark.parametrize("name", ["fig3", "coupling", "shock"])
def test_other_data_of_the_same_name_are_refused_and_older_records_kept(quick, tmp_path, monkeypatch, name):
    path, mine = tmp_path / "records.jsonl", replace(images(QUICK), name="mine")
    *older, last = finished(quick / f"{name}.jsonl")
    for old in older:
        records.append(path, of({"data": "mine"}, old))
    before = path.read_bytes()
    monkeypatch.setattr(sessions, "images", lambda *_, **__: mine)
    EXPERIMENTS[name].run(Session(QUICK, path))
    (added,) = finished(path)[len(older) :]
    assert path.read_bytes().startswith(before)
    assert added["config"] == of(identity.described(mine), last)["config"] and identity.DIGEST in added["config"]
    others, told = replace(mine, train_y=mine.train_y.flip(0)), []
    monkeypatch.setattr(sessions, "images", lambda *_, **__: others)
    with pytest.raises(UsageError, match=r"records\.jsonl holds runs on other data called mine"):
        EXPERIMENTS[name].run(Session(QUICK, path, "cpu", lambda *what: told.append(what)))
    assert not told and finished(path)[-1] == added


def test_images_are_the_ones_that_the_experiment_wants(tmp_path):
    assert "320 of 4,000" in images(QUICK).name and len(images(Options()).train_y) == 4000
    for folder in (tmp_path / "beside", tmp_path / "same"):
        write_cifar(folder / "cifar-10-batches-py")
        write_images(folder if folder.name == "same" else folder / "zoo")
        options = Options(data=folder, data_name="mine")
        assert images(options).name == "mine"
        assert images(options, many=True).classes == ("ape", "bee")
    write_idx(tmp_path / "idx")
    assert images(Options(data=tmp_path / "idx"), many=True).name == "Fashion-MNIST"
    with pytest.raises(UsageError, match="the experiments need images; this is a text"):
        images(Options(data=write_text(tmp_path / "play.txt")))
    with pytest.raises(UsageError, match="nothing known is there"):
        (tmp_path / "empty").mkdir()
        images(Options(data=tmp_path / "empty"))


def test_what_the_budget_leaves_is_named(tmp_path, monkeypatch):
    def slow(name):
        def run(session):
            session.progress(name, 0, 1)
            now[0] += 30
            records.append(session.out, records.make({"name": name}, 0, []))

        return run

    now = [0.0]
    monkeypatch.setattr(reproduce.time, "perf_counter", lambda: now[0])
    for name in EXPERIMENTS:
        monkeypatch.setattr(EXPERIMENTS[name], "run", slow(name))
    left = reproduce.reproduce(list(EXPERIMENTS), QUICK, tmp_path, budget=80)
    assert left == list(EXPERIMENTS)[3:] and len(list(tmp_path.iterdir())) == 3


def test_the_page_has_every_claim_and_every_figure_and_tells_what_is_missing(quick, tmp_path):
    page, details, *figures = reproduction.write(quick, tmp_path / "docs")
    text = page.read_text() + details.read_text()
    assert "**Quick runs**" in text and "Not run yet" not in text
    for name, experiment in EXPERIMENTS.items():
        assert f"figures/{name}.svg" in text and experiment.SETTING in text
        assert all(claim.text in text and claim.section in text for claim in experiment.CLAIMS)
    assert [f.stem for f in figures] == list(EXPERIMENTS)
    assert all(ElementTree.parse(f).getroot().tag.endswith("svg") for f in figures)
    (tmp_path / "fig1.jsonl").write_bytes((quick / "fig1.jsonl").read_bytes())
    text = reproduction.write(tmp_path, tmp_path / "docs")[0].read_text()
    assert "Not run yet: fig2, l2, scale, fig3, coupling, shock." in text and "Quick" not in text
    with pytest.raises(UsageError, match="no records of fig1"):
        reproduction.write(tmp_path / "docs", tmp_path / "docs")


def test_the_page_in_docs_is_what_the_committed_records_give():
    found, source, docs = {name: kept(name, RESULTS) for name in EXPERIMENTS}, RESULTS.relative_to(ROOT), ROOT / "docs"
    assert reproduction.page(found, source, Path("docs")) == (docs / "reproduction.md").read_text(encoding="utf-8")
    assert reproduction.details(found) == (docs / "reproduction-details.md").read_text(encoding="utf-8")
    assert not any("EvenStep" in json.dumps(r["config"]) for records in found.values() for r in records)


def test_gradient_and_newton_direction_of_the_benign_function():
    w = torch.tensor([1.3, -0.8], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(fig1.value(w), w)
    hessian = torch.autograd.functional.hessian(fig1.value, w.detach())
    torch.testing.assert_close(fig1.gradient(w.detach()), grad)
    torch.testing.assert_close(fig1.natural(w.detach()), torch.linalg.solve(hessian, grad))
    assert math.isfinite(fig1.value(torch.tensor([0.0, 1000.0])))


def test_trajectories_against_closed_forms():
    """SG's and Newton's w₁ shrink geometrically; eqs. 9 and 10 take steps of length η in the metric."""
    paths = {name: fig1.trajectory(name, 8) for name in fig1.METHODS}
    sg, newton, whole, blocks = paths.values()
    for t in range(9):
        assert sg[t]["w1"] == pytest.approx(3 * 0.7**t)
        assert newton[t]["w1"] == pytest.approx(3 * 0.97**t)
    assert newton[1]["w2"] == pytest.approx(3 - 0.03 * math.sinh(6) / 2)  # sinh·cosh(3) = sinh(6)/2 = 100.86
    for path, per_block in ((whole, False), (blocks, True)):
        for now, then in itertools.pairwise(path):
            first, second = then["w1"] - now["w1"], (then["w2"] - now["w2"]) / math.cosh(now["w2"])
            if per_block:
                assert (abs(first), abs(second)) == pytest.approx((0.3, 0.3))
            else:
                assert math.hypot(first, second) == pytest.approx(0.3)


def test_coupling_formula_is_the_mean_over_all_batches():
    """Every batch of 3 out of 5 equally likely examples, with its own mean and with the exact one."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 2, generator=generator, dtype=torch.float64).exp()
    g = torch.sin(x @ torch.randn(2, 3, generator=generator, dtype=torch.float64)) + 0.2
    alpha2, beta2 = torch.tensor([0.7, 2.0]).double(), torch.tensor([1.0, 3.0, 0.5]).double()
    off = []
    for rows in itertools.product(range(5), repeat=3):
        bx, bg = x[list(rows)], g[list(rows)]
        own = coupling.bias_step(bx, bg, bx.mean(0), alpha2, beta2)
        off.append(own - coupling.bias_step(bx, bg, x.mean(0), alpha2, beta2))
    truth = torch.stack(off).mean(0)
    torch.testing.assert_close(coupling.formula(x, g, 3, alpha2, beta2), truth)
    assert truth.abs().min() > 1e-3


def test_bias_step_is_eq_3_written_out():
    x, g = torch.rand(6, 2).double(), torch.randn(6, 3).double()
    mu, alpha2, beta2 = torch.rand(2).double(), torch.rand(2).double(), torch.rand(3).double()
    for j in range(3):
        weights = [beta2[j] * alpha2[i] * (g[:, j] * (x[:, i] - mu[i])).mean() for i in range(2)]
        wanted = beta2[j] * g[:, j].mean() - mu[0] * weights[0] - mu[1] * weights[1]
        torch.testing.assert_close(coupling.bias_step(x, g, mu, alpha2, beta2)[j], wanted)


def test_sampled_bias_meets_the_formula_and_is_judged():
    rows = coupling.bias(4, 400_000, seed=1)
    record = {"config": {"part": "bias", "batch": 4}, "metrics": rows}
    assert coupling.measured.judge([record]).held
    wrong = copy.deepcopy(record)
    wrong["metrics"][0]["formula"] *= -3
    assert coupling.measured.judge([wrong]).held is False


def small_net():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def test_own_batch_moments_are_those_of_a_first_step():
    model = small_net()
    optimizer = METHODS["whitening-own"].optimizer(model, lr=0.1)
    for k in range(3):
        batch = torch.rand(8, 4).double() + k, torch.randint(3, (8,))
        twin = copy.deepcopy(model)
        classify(evenstep.WhitenedSGD(twin, lr=0.1), twin, [batch])
        classify(optimizer, model, [batch])
        torch.testing.assert_close([*model.parameters()], [*twin.parameters()])


def test_l2_is_a_term_of_the_loss():
    model, twin = twins(small_net)
    model.append(L2Term(model, 0.25))
    with_term, plain = evenstep.WhitenedSGD(model, lr=0.1), evenstep.WhitenedSGD(twin, lr=0.1)
    for k in range(3):
        x, y = torch.rand(8, 4).double() + k, torch.randint(3, (8,))
        classify(with_term, model, [(x, y)])
        penalty = 0.25 / 2 * sum((p**2).sum() for p in twin.parameters() if p.dim() > 1)
        descend(plain, functional.cross_entropy(twin(x), y) + penalty)
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()])
    assert torch.equal(model.eval()(x), twin(x))


def made_up(contender, lr, seed, *losses, **config):
    settings = {"options": contender.options, "model_options": {}, "data": "none", **config}
    return record(contender.method, lr, losses, seed, **settings)


@pytest.mark.parametrize(
    ("best", "beyond", "chosen"),
    [(1.0, None, 1.0), (4.0, 4.0, 4.0), (0.25, 0.25, 0.25), (0.001, 0.25, 0.25), (64.0, 4.0, 4.0)],
)
def test_a_grid_grows_once_where_the_best_is_at_an_end_and_its_best_has_three_seeds(monkeypatch, best, beyond, chosen):
    """All contenders train in two stages: their grids, then what lies beyond and the further seeds."""

    def sweep_valley(trials, arrays, out, *, device, on_begin):
        """Losses are lowest at `best`; training diverges ten times above it."""
        stages.append([(t.method, t.lr, t.seed) for t in trials])
        for trial in trials:
            on_begin(trial)
        losses = [None if t.lr > 10 * best else 0.1 + abs(math.log10(t.lr / best)) / 2 for t in trials]
        who = [tuning.Contender("", t.method, ()) for t in trials]
        return [made_up(c, t.lr, t.seed, loss) for c, t, loss in zip(who, trials, losses, strict=True)]

    stages, told, grid = [], [], (0.5, 1.0, 2.0)
    monkeypatch.setattr(sweep, "sweep", sweep_valley)
    contenders = [tuning.Contender(name, name, grid) for name in ("sg", "adam")]
    session = Session(Options(seed=7), Path("none"), "cpu", lambda *what: told.append(what))
    found = tuning.tuned(session, [(contender, {}) for contender in contenders], images(QUICK))
    first, last = stages
    assert first == [(name, lr, 7) for name in ("sg", "adam") for lr in grid] and told[0] == ("sg, stepsize 0.5", 0, 6)
    rates = sorted({lr for _, lr, _ in last})
    assert set(rates) == {min(grid, key=lambda lr: abs(math.log(lr / best))), beyond} - {None}
    assert sorted(last) == sorted((name, lr, seed) for name in ("sg", "adam") for lr in rates for seed in (7, 8, 9))
    assert len({(r["config"]["method"], r["seed"], r["config"]["lr"]) for r in found}) == len(found)
    for contender in contenders:
        runs = tuning.at_best(found, contender)
        assert [(r["seed"], r["config"]["lr"]) for r in runs] == [(seed, chosen) for seed in (7, 8, 9)]


def test_failures_are_those_above_the_best_stepsize():
    found = [
        made_up(fig2.SG, lr, 0, loss) for lr, loss in ((0.01, 2.5), (0.1, 0.5), (0.2, 0.7), (0.4, None), (0.8, 9.0))
    ]
    assert tuning.first_failure(found, fig2.SG) == 0.4
    assert tuning.first_failure(found[:3], fig2.SG) is None and tuning.first_failure([], fig2.SG) is None
    assert tuning.rates_table(found, [fig2.SG])[1] == ["SG", "0.1", "1", "0.500", "0.500", "0.0 %", "0.4"]


def test_runs_that_end_above_guessing_are_no_results():
    found = [made_up(fig2.SG, lr, 0, loss) for lr, loss in ((0.1, 2.6), (0.2, 2.5), (0.4, None))]
    assert tuning.best_rate(found) == 0.1 and tuning.beyond(found) == 0.05
    assert tuning.losses(found) == [math.inf] * 3
    assert tuning.best_rate([*found, made_up(fig2.SG, 0.8, 0, 2.2)]) == 0.8


def ends(experiment, losses, **config):
    """Runs that end with these losses, by the contender's name; of several seeds where there are several."""
    return [
        made_up(getattr(experiment, name), 0.1, seed, loss, **config)
        for name, mine in losses.items()
        for seed, loss in enumerate(mine)
    ]


def canonical(*ends_by_rate, sg=0.9):
    rival = [made_up(fig2.SG, 0.1, 0, sg)] if sg else []
    return rival + [made_up(fig2.CANONICAL, lr, 0, loss) for lr, loss in ends_by_rate]


def scaling(small, whole):
    return [
        run
        for epochs, losses in ((40, small), (4, whole))
        for run in ends(scale, losses, epochs=epochs, model_options={"classes": 200})
    ]


def l2_run(contender, seed, accuracies, loss=0.5):
    network = {"l2": contender.l2} if contender.l2 else {}
    run = made_up(contender, 0.2, seed, *[loss] * len(accuracies), model_options=network)
    for row, accuracy in zip(run["metrics"], accuracies, strict=True):
        row["test_accuracy"] = accuracy
    return run


def l2_runs(*penalized):
    found = [l2_run(l2.BATCH_NORM, seed, (0.5, 0.65, 0.66)) for seed in (0, 1)]
    found += [l2_run(l2.with_l2(l2.WHITENING, 0.01), seed, penalized) for seed in (0, 1)]
    found += [l2_run(l2.WHITENING, 0, (0.5, 0.6)), l2_run(l2.with_l2(l2.WHITENING, 0.001), 0, (0.1, 0.2, 0.3))]
    return found


FAILED = l2_run(l2.with_l2(l2.WHITENING, 0.1), 0, (0.5, 0.9), loss=2.5)  # above guessing


def fig3_runs(loss, seconds, norm=1.0, others=9.0):
    """A run for each way to go on: whitening's, batch norm's, and those of the others."""
    ends = {fig3.BATCH_NORM: (norm, 1.0)} | dict.fromkeys(fig3.AFTERWARDS, (others, 9.0))
    ends[fig3.WHITENING] = loss, seconds
    return [
        {
            "config": {"name": name, "then": None, "first": {"lr": 1.0, "model_options": {"classes": 200}}},
            "metrics": [{"epoch": k, "seconds": seconds, "swept_loss": loss} for k in (1, 2)],
        }
        for name, (loss, seconds) in ends.items()
    ]


def shock_runs(**after):
    """Runs without a shock; unguarded whitening after one, and guarded whitening, which it spared."""
    calm = {"mean_loss": 0.5, "dead_units": 0.0, "grown_at_once": 0, "grown_on_average": 0.1}
    runs = [(shock.PAPERS, 1.0, {}), ("WhitenedSGD", 1.0, {}), (shock.PAPERS, 100.0, after)]
    return [
        {"config": {"name": name, "kappa": kappa}, "seed": 0, "metrics": [calm | summary]}
        for name, kappa, summary in [*runs, ("WhitenedSGD", 100.0, {"mean_loss": 0.51})]
    ]


OWN_MEANS = ends(coupling, {"RUNNING": (0.5, 0.6), "OWN": (1.0, 9.0)}, batch_size=64)
VERDICTS = [  # decided by all seeds
    (fig2.left, ends(fig2, {"SG": (0.7, 0.8), "FAN_IN": (0.5, 0.6)}), True, "Lower"),
    (fig2.left, ends(fig2, {"SG": (0.5, 0.6), "FAN_IN": (0.7, 0.8)}), False, "Not lower"),
    (fig2.left, ends(fig2, {"SG": (0.5, 0.7), "FAN_IN": (0.6, 0.8)}), None, "Within the spread"),
    # "far below" is half of the loss; guarded whitening is not the paper's, so it has no say
    (fig2.right, ends(fig2, {"BATCH_NORM": (0.5,), "WHITENING": (0.1,), "GUARDED": (0.01,)}), True, "20% of its loss"),
    (fig2.right, ends(fig2, {"BATCH_NORM": (0.5,), "WHITENING": (0.4,), "GUARDED": (0.01,)}), None, "but not far"),
    (fig2.right, ends(fig2, {"BATCH_NORM": (0.5,), "WHITENING": (0.6,), "GUARDED": (0.01,)}), False, "120%"),
    (fig2.right, ends(fig2, {"BATCH_NORM": (3.0,), "WHITENING": (2.9,)}), None, "norm 1 of 1 seeds failed at 0.1."),
    (fig2.slightly, ends(fig2, {"BATCH_NORM": (0.2,), "SG": (0.5,)}), None, "more than slightly"),
    # it must fail soon to fail with little warning
    (fig2.canonical, canonical((1e-4, 0.3), (2e-4, None)), True, "It fails from 0.0002 on, 2 times its best"),
    (fig2.canonical, canonical((1e-4, 0.3), (2e-4, 0.5)), None, "It failed at no stepsize tried."),
    (fig2.canonical, canonical((1e-4, 0.3), (1e-2, None)), False, "100 times its best"),
    (fig2.canonical, canonical((1e-4, None), (2e-4, None)), False, "It failed at every stepsize tried."),
    (coupling.disrupted, OWN_MEANS, True, "batch 64: 1.000 (1 of 2 seeds failed) with its own, 0.550 ± 0.071 with"),
    (scale.few, scaling({"SG": [2.0], "BATCH_NORM": [1.5], "WHITENING": [1.0]}, {"SG": [3.0]}), True, ""),
    (scale.few, scaling({"SG": [2.0], "BATCH_NORM": [0.5], "WHITENING": [1.0]}, {"SG": [3.0]}), False, ""),
    (scale.many, scaling({"SG": [2.0]}, {"SG": [3.0], "WHITENING": [4.0]}), True, ""),
    (scale.many, scaling({"SG": [2.0]}, {"SG": [3.0], "WHITENING": [2.5]}), False, ""),
    (l2.recovered, l2_runs(0.5, 0.6, 0.655), True, "λ = 0.01,"),
    (l2.recovered, l2_runs(0.5, 0.6, 0.64), False, "λ = 0.01,"),
    (l2.recovered, [*l2_runs(0.5, 0.6, 0.655), FAILED], True, "λ = 0.01,"),
    (l2.rates, l2_runs(0.5, 0.65, 0.66), True, ""),
    (l2.rates, l2_runs(0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.66), False, ""),
    (l2.rates, l2_runs(None, None, 0.66), None, "after the last epoch alone"),
    (fig3.per_epoch, fig3_runs(1.04, 2.0), True, "1.040"),
    (fig3.per_epoch, fig3_runs(1.2, 0.5), False, "1.200"),
    (fig3.per_epoch, fig3_runs(1.0, 1.0)[:2], None, "Not run."),
    (fig3.per_epoch, fig3_runs(5.4, 1.0, norm=5.4), None, "inf"),  # above guessing among 200 classes
    (fig3.per_second, fig3_runs(1.04, 2.0), False, "2.00"),
    (fig3.per_second, fig3_runs(1.2, 0.5), True, "0.50"),
    *((claim, shock_runs(mean_loss=50.0, dead_units=0.3, grown_at_once=12), True, "") for claim in shock.CLAIMS),
    *((claim, shock_runs(mean_loss=0.6), False, "") for claim in shock.CLAIMS),
    (shock.harm, shock_runs(mean_loss=None, grown_at_once=12), True, "inf times the loss"),
    (shock.harm, shock_runs(mean_loss=0.6), False, "WhitenedSGD 1.020"),
]


@pytest.mark.parametrize(("claim", "found", "held", "text"), VERDICTS)
def test_a_verdict_follows_from_the_records(claim, found, held, text):
    verdict = claim.judge(found)
    assert verdict.held is held and text in verdict.text


def test_l2_strengths_grow_as_stepsizes_do():
    def swept(**accuracy):
        return [l2_run(l2.with_l2(l2.WHITENING, float(s)), 0, (a,)) for s, a in accuracy.items()]

    assert l2.next_strength(swept(**{"0.01": 0.5, "0.1": 0.6})) == 1.0
    assert l2.next_strength(swept(**{"0.01": 0.5, "0.1": 0.6, "1.0": 0.4})) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_quick_runs_on_a_gpu(name, tmp_path):
    found = EXPERIMENTS[name].run(Session(QUICK, tmp_path / "records.jsonl", torch.device("cuda")))
    assert found and all(claim.judge(found).text for claim in EXPERIMENTS[name].CLAIMS)
