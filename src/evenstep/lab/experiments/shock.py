"""Shocks (§4.4): a tenth of a hidden layer's ReLU units rescaled by κ in mid-training, the function unchanged.

Weights and bias into those units are multiplied by κ, the weights out of them divided by it. The running moments are
then off by κ² at once, which is what the paper found behind its failures; `MomentDistances` measures it.
"""

import itertools
import math
import statistics
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

import evenstep

from ...math.moments import batch_moments, usable
from .. import trial
from ..data import Arrays
from ..reading import Record
from ..trial import Trial
from .common import Figure, NotRun, Verdict, claim, failures_expected
from .fig2 import UNGUARDED
from .session import Session

GUARDED: dict[str, dict[str, Any]] = {
    "WhitenedSGD": {"method": "whitening", "lr": 0.3, "options": {}},
    "UnitStep": {"method": "unitstep", "lr": 0.05, "options": {}},
    "Whitened(AdamW)": {"method": "whitened-adam", "lr": 1e-3, "options": {"betas": (0.9, 0.999)}},
}
OPTIMIZERS = GUARDED | {
    f"unguarded {name}": {**how, "options": {**how["options"], **UNGUARDED}} for name, how in GUARDED.items()
}
PAPERS = "unguarded WhitenedSGD"
KAPPAS = (0.01, 0.03, 10.0, 30.0, 100.0)
BATCH = 64
SETTING = (
    "The paper's CNN, batch 64, 200 steps; then 12 of the 120 units of its first dense layer are rescaled by κ, and "
    "100 steps follow, on the same batches as without a shock (κ = 1). Two seeds. The ratio is the mean training loss "
    "after the shock over that without. The paper's whitening is `WhitenedSGD` without guards, at the stepsize 0.3."
)


class Inputs:
    """The units of each layer's input in the newest step: how many have grown, and the share that is dead.

    Grown: the variance of the batch is over ten times the running one. Dead: zero on the whole batch.
    """

    def __init__(self, optimizer: Any) -> None:
        """Watch every step of `optimizer`."""
        self.grown: dict[str, float] = {}  # by the layer's path
        self.dead: dict[str, float] = {}
        optimizer._monitors.append(self)

    def note(self, block: Any, state: dict[str, Any]) -> None:
        """Called by the optimizer for each block, before its batch joins the moments."""
        layer = block.statistics
        if layer is None or block.entry is None or "mx" not in state:
            return
        sums, path = layer.sums(), block.entry.path
        offset, var = batch_moments(sums)
        mean, finite = layer.centre + offset, usable(sums.rows, offset, var)
        known = finite & (state["mass"] > 0) & (state["vx"] > torch.finfo(var.dtype).tiny)
        self.grown[path] = (known & (var > 10 * state["vx"])).sum().item()
        self.dead[path] = (finite & (mean == 0) & (var == 0)).double().mean().item()

    def end_step(self) -> None:
        """Called by the optimizer at the end of a step."""


@torch.no_grad()
def shock(model: nn.Module, kappa: float, seed: int) -> None:
    """Rescale a tenth of the units of the first nn.Linear without changing the function."""
    first, second = [m for m in model.modules() if isinstance(m, nn.Linear)][:2]
    count = first.out_features
    units = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: count // 10]
    units = units.to(first.weight.device)
    first.weight[units] *= kappa
    first.bias[units] *= kappa
    second.weight[:, units] /= kappa


def aftermath(
    arrays: Arrays, name: str, seed: int, kappa: float, before: int, after: int, model: nn.Module | None = None
) -> list[dict[str, Any]]:
    """A row per step after a shock of κ (1 is none): the loss, and the inputs and events of the layer behind it.

    The first two nn.Linear of the network, by default the paper's CNN, are the shocked layer and the one behind it.
    Training ends early where the loss is no longer finite.
    """
    epochs = math.ceil((before + after) * BATCH / len(arrays.train_y))
    options = {} if model is not None else {"classes": len(arrays.classes)}
    how = Trial(**OPTIMIZERS[name], seed=seed, epochs=epochs, batch_size=BATCH, model_options=options)
    training = trial.start(how, arrays, arrays.train_x.device, model=model)
    steps, rows = training.run(), list[dict[str, Any]]()
    for _ in islice(steps, before):
        pass
    _, layer = [n for n, m in training.model.named_modules() if isinstance(m, nn.Linear)][:2]
    optimizer: Any = training.optimizer
    monitor, inputs = evenstep.CurvatureMonitor(optimizer), Inputs(optimizer)
    if kappa != 1:
        shock(training.model, kappa, seed)
    for _ in islice(steps, after):
        events = [str(event) for event in monitor.events() if event.layer == layer]
        row = {"step": len(rows) + 1, "loss": training.loss.item(), "grown": inputs.grown[layer], "events": events}
        rows.append({**row, "dead_somewhere": max(inputs.dead.values(), default=0.0)})
    return rows


def mean_loss(rows: list[dict[str, Any]]) -> float:
    """The mean loss over the steps after the shock."""
    return statistics.fmean(row["loss"] for row in rows)


def condensed(*shock: Any, trace: bool) -> list[dict[str, Any]]:
    """The metrics of a record: a summary, then, if wanted, the first steps and every tenth after them."""
    rows = aftermath(*shock)
    summary = {
        "mean_loss": mean_loss(rows),
        "dead_units": min(row["dead_somewhere"] for row in rows[-10:]),
        "grown_at_once": rows[0]["grown"],
        "grown_on_average": statistics.fmean(row["grown"] for row in rows),
        "events": [event for row in rows for event in row["events"]][:5],
    }
    kept = [row for row in rows if row["step"] <= 30 or row["step"] % 10 == 0] if trace else []
    return [summary, *({k: row[k] for k in ("step", "loss", "grown")} for row in kept)]


def run(session: Session) -> list[Record]:
    """A record for each optimizer, seed and κ."""
    arrays, quick, seed = session.images(), session.options.quick, session.options.seed
    names = (PAPERS, "WhitenedSGD") if quick else tuple(OPTIMIZERS)
    kappas = (1.0, 100.0) if quick else (1.0, *KAPPAS)
    seeds = [seed] if quick else [seed, seed + 1]
    before, after = (20, 10) if quick else (200, 100)
    part = arrays.subset(min(BATCH * (before + after), len(arrays.train_y)))
    found: list[Record] = []
    for name, number, kappa in itertools.product(names, seeds, kappas):
        session.progress(f"{name}, seed {number}, κ = {kappa:g}", len(found), len(names) * len(seeds) * len(kappas))
        config = {"experiment": "shock", "name": name, "kappa": kappa, "seed": number, "network": "paper_cnn"}
        trace = number == seed and kappa in (1.0, KAPPAS[0], KAPPAS[-1])
        make = partial(condensed, part, name, number, kappa, before, after, trace=trace)
        with failures_expected():
            found.append(session.stored({**config, "before": before, "after": after}, make, arrays))
    return found


def mean(records: list[Record], name: str, kappa: float, column: str) -> float:
    """A column of the summaries, averaged over seeds; infinite where one is not finite."""
    mine = [r for r in records if (r["config"]["name"], r["config"]["kappa"]) == (name, kappa)]
    values = [r["metrics"][0][column] for r in mine]
    return statistics.fmean(math.inf if value is None else value for value in values)


def ratio(records: list[Record], name: str, kappa: float) -> float:
    """The loss after a shock over that without, each a mean over seeds."""
    return mean(records, name, kappa, "mean_loss") / mean(records, name, 1.0, "mean_loss")


def named(records: list[Record]) -> tuple[list[str], list[float]]:
    """The optimizers that ran at every κ of the records, and these κ without 1."""
    run: dict[str, set[float]] = {}
    for record in records:
        run.setdefault(record["config"]["name"], set()).add(record["config"]["kappa"])
    every = {1.0}.union(*run.values())
    return [name for name, kappas in run.items() if kappas == every and len(every) > 1], sorted(every - {1.0})


def judged(records: list[Record]) -> tuple[list[str], list[float]]:
    """The same, with unguarded whitening among the optimizers."""
    names, kappas = named(records)
    if PAPERS not in names:
        raise NotRun
    return names, kappas


@claim("§4.4", "Running and fresh moments usually agree; when ReLU units are rescaled they are completely different.")
def agreement(records: list[Record]) -> Verdict:
    """Fresh against running variances of the shocked units, without a shock and with one."""
    _, kappas = judged(records)
    usual = mean(records, PAPERS, 1.0, "grown_on_average")
    jump = mean(records, PAPERS, max(kappas), "grown_at_once")
    return Verdict(
        usual < 1 < 3 * usual + 1 < jump,
        f"The variance of a unit's output on a batch was over ten times the running one for {usual:.1f} of the layer's "
        f"units in a step without a shock, and for {jump:.0f} at the step after κ = {max(kappas):g}.",
    )


@claim("§4.4", "This leads to unreasonably large changes of the weights.")
def harm(records: list[Record]) -> Verdict:
    """The loss after a shock without guards, and with them."""
    names, kappas = judged(records)
    harmed = {kappa: ratio(records, PAPERS, kappa) for kappa in kappas}
    worst = max(harmed, key=lambda kappa: harmed[kappa])
    guarded = {n: max(ratio(records, n, kappa) for kappa in kappas) for n in names if n in GUARDED}
    return Verdict(
        not harmed[worst] < 2,
        f"Unguarded whitening after κ = {worst:g}: {harmed[worst]:.3g} times the loss without a shock. With guards, "
        f"the worst of all κ: {', '.join(f'{name} {price:.3f}' for name, price in guarded.items())}.",
    )


@claim("§4.4", "These disable units: they remain zero whatever the input.")
def death(records: list[Record]) -> Verdict:
    """Units that are zero on the last batches, in the worst layer and without guards; 5 % more than before are many."""
    _, kappas = judged(records)
    dead = {kappa: mean(records, PAPERS, kappa, "dead_units") for kappa in (1.0, *kappas)}
    worst = max(kappas, key=lambda kappa: dead[kappa])
    return Verdict(
        dead[worst] >= dead[1.0] + 0.05,
        f"Unguarded whitening after κ = {worst:g}: {dead[worst]:.0%} of the worst layer's inputs are zero on a whole "
        f"batch, {dead[1.0]:.0%} without a shock.",
    )


CLAIMS = (agreement, harm, death)


def table(records: list[Record]) -> list[list[str]]:
    """Head and rows for the docs: loss ratios."""
    names, kappas = named(records)
    return [["κ", *(f"{k:g}" for k in kappas)], *([n, *(f"{ratio(records, n, k):.4g}" for k in kappas)] for n in names)]


def plot(records: list[Record]) -> Figure:
    """The price of each shock, and the monitor's view of the largest one."""
    from .. import drawing

    figure, (price, loss, view) = drawing.panels(3)
    names, kappas = named(records)
    for k, name in enumerate(names):
        price.plot(kappas, [min(ratio(records, name, kappa), 100) for kappa in kappas], **drawing.style(k, name))
    for name in (n for n in names if n.endswith("WhitenedSGD")):
        for kappa, line in ((1.0, ":"), (max(kappas), "-")):
            traces = [r["metrics"][1:] for r in records if (r["config"]["name"], r["config"]["kappa"]) == (name, kappa)]
            rows = max(traces, key=len)
            style: dict[str, Any] = {"color": drawing.COLOURS[names.index(name)], "linestyle": line}
            for panel, column in ((loss, "loss"), (view, "grown")):
                steps, values = ([row[key] for row in rows] for key in ("step", column))
                panel.plot(steps, values, label=f"{name}, κ = {kappa:g}", **style)
    price.set_xscale("log")
    for panel in (price, loss):
        panel.set_yscale("log")
        drawing.legend(panel)
    drawing.plain_log(price.yaxis)
    price.set(xlabel="κ", ylabel="loss after the shock / loss without (top: 100 or more)")
    loss.set_ylim(top=min(loss.get_ylim()[1], 1e4))
    loss.set(xlabel="steps after the shock", ylabel="training loss of the batch")
    view.set(xlabel="steps after the shock", ylabel="units whose variance grew tenfold")
    return figure
