"""Figure 2: the paper's CNN on CIFAR-10, every method at its best constant stepsize (§3.5, §4.2; §2.4 besides)."""

import math
import statistics
from pathlib import Path
from typing import Any

import torch

from ..records import Record
from ..summary import final_loss
from .common import NOT_RUN, Claim, Figure, Options, Progress, Verdict, below, images, only, silent
from .tuning import (
    Contender,
    Entrant,
    Plan,
    at_best,
    best_rate,
    doubled,
    first_failure,
    losses,
    outcome,
    rates_table,
    trained,
    tuned,
)

UNGUARDED = {"fresh_max": None, "trust": None}
SG = Contender("SG", "sg", doubled(0.00625))
FAN_IN = Contender("SG ÷ √(n·S)", "fan-in", doubled(0.3125))
BATCH_NORM = Contender("SG + batch norm", "batch-norm", doubled(0.025))
WHITENING = Contender("whitening (the paper's)", "whitening", doubled(0.025), UNGUARDED)
CANONICAL = Contender("canonical (the paper's)", "canonical", doubled(1.25e-05), UNGUARDED)
GUARDED = Contender("whitening, guarded", "whitening", doubled(0.2))
GUARDED_CANONICAL = Contender("canonical, guarded", "canonical", doubled(0.000125))
UNITSTEP = Contender("UnitStep", "unitstep", doubled(0.003125))
PAPERS, OURS = (SG, FAN_IN, BATCH_NORM, WHITENING, CANONICAL), (GUARDED, GUARDED_CANONICAL, UNITSTEP)
CONTENDERS = (*PAPERS, *OURS)
FULL: dict[str, Any] = {"epochs": 40, "batch_size": 64}
QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 64}
SETTING = (
    "C6(5x5)-P-C16(5x5)-P-F120-F84-F10, PyTorch's first weights, batch 64, 40 epochs, constant stepsize: the lowest "
    "training loss of the last epoch on one seed, from seven stepsizes of factor 2, and an eighth beyond an end if the "
    "best lies there; then two further seeds. The paper's own methods run without guards (damping 0.1 is our reading "
    'of its "suitable range"); guarded whitening, guarded canonical scaling and `UnitStep` are our addition.'
)


def run(options: Options, out: Path, device: torch.device | str = "cpu", progress: Progress = silent) -> list[Record]:
    """Records of all contenders."""
    arrays = images(options, device)
    only(out, [arrays])
    plan = Plan(seeds=1, growth=0, thin=2) if options.quick else Plan()
    settings = QUICK if options.quick else FULL
    entrants = [Entrant(contender, settings) for contender in CONTENDERS]
    return tuned(entrants, plan, arrays, out, device=device, progress=progress, seed=options.seed)


def summary(records: list[Record], contender: Contender) -> str:
    """A contender's final loss and stepsize in a few words."""
    best = at_best(records, contender)
    return f"{contender.label} {outcome(best)}" + (f" at {best[0]['config']['lr']:g}" if best else "")


def compared(records: list[Record], one: Contender, other: Contender) -> tuple[bool | None, float]:
    """Whether one contender's losses are below the other's, and the ratio of their means."""
    ours, theirs = losses(at_best(records, one)), losses(at_best(records, other))
    share = statistics.fmean(ours) / statistics.fmean(theirs) if ours and theirs else float("nan")
    return below(ours, theirs), share


def portion(share: float) -> str:
    """One loss as a share of another, in a few words; nothing where one of them is not finite."""
    return f": {share:.0%} of its loss" if 0 < share < math.inf else ""


def left(records: list[Record]) -> Verdict:
    """SG divided by √(n·S) against SG."""
    held = below(losses(at_best(records, FAN_IN)), losses(at_best(records, SG)))
    verb = {True: "Lower", False: "Not lower", None: "Within the spread of seeds"}[held]
    return Verdict(
        held, f"{verb}: {summary(records, FAN_IN)}, {summary(records, SG)} (training loss of the last epoch)."
    )


def slightly(records: list[Record]) -> Verdict:
    """Batch norm against SG: a slight improvement leaves more than half of the loss."""
    lower, share = compared(records, BATCH_NORM, SG)
    held = None if lower and share <= 0.5 else lower
    more = " (more than slightly)" if held is None and lower else ""
    return Verdict(held, f"{summary(records, BATCH_NORM)}, {summary(records, SG)}{portion(share)}{more}.")


def right(records: list[Record]) -> Verdict:
    """Whitening against batch norm: far below is at most half of its loss."""
    lower, share = compared(records, WHITENING, BATCH_NORM)
    held = None if lower and share > 0.5 else lower
    less = " (lower, but not far)" if held is None and lower else ""
    added = "; ".join(summary(records, c) for c in OURS if c.mine(records))
    return Verdict(
        held,
        f"{summary(records, WHITENING)}, {summary(records, BATCH_NORM)}{portion(share)}{less}. Ours: {added}.",
    )


def canonical(records: list[Record]) -> Verdict:
    """Canonical scaling: as good as the best, and how soon beyond its best stepsize it fails."""
    mine = CANONICAL.mine(records)
    rivals = [at_best(records, c) for c in (SG, BATCH_NORM) if c.mine(records)]
    if not mine or not rivals:
        return NOT_RUN
    better = min(rivals, key=lambda runs: min(losses(runs)))
    rival = losses(better)
    fast, best, failure = (
        below(losses(at_best(records, CANONICAL)), rival),
        best_rate(mine),
        first_failure(records, CANONICAL),
    )
    warned = [r for r in mine if failure and best <= r["config"]["lr"] < failure and trained(r)]
    text = f"{summary(records, CANONICAL)}, the better of SG and batch norm {outcome(better)}. "
    if failure is None:
        return Verdict(None if fast else fast, text + "It failed at no stepsize tried.")
    if failure <= best:
        return Verdict(None if fast else fast, text + "It failed at every stepsize tried.")
    soon = failure / best <= 4.1
    return Verdict(
        None if fast is None else fast and soon,
        f"{text}It fails from {failure:g} on, {failure / best:.3g} times its best stepsize; the one before that still "
        f"had {final_loss(max(warned, key=lambda r: r['config']['lr'])):.3f}; {summary(records, GUARDED_CANONICAL)}.",
    )


def table(records: list[Record]) -> list[list[str]]:
    """Head and rows for the docs."""
    return rates_table(records, CONTENDERS)


CLAIMS = (
    Claim("§3.5, fig. 2 left", "Dividing the stepsize by √(n·S) trains better than a global stepsize.", left),
    Claim("§4.2, fig. 2 right", "Batch norm is a slight improvement over plain SG.", slightly),
    Claim("§4.2, fig. 2 right", "Whitening quickly drives the training loss far below batch norm's.", right),
    Claim(
        "§2.4",
        "Canonical scaling competes with the best known methods, but diverges with little warning at larger stepsizes.",
        canonical,
    ),
)


def plot(records: list[Record]) -> Figure:
    """The paper's two panels, ours beside them, and what each stepsize gives."""
    from .. import drawing
    from .panels import curves, sensitivity

    figure, axes = drawing.panels(4, width=4.2)
    for panel, contenders, shift, title in zip(
        axes,
        ((SG, FAN_IN), (BATCH_NORM, WHITENING, CANONICAL), OURS),
        (0, 2, 5),
        ("SG, with and without ÷ √(n·S)", "batch norm against whitening", "ours"),
        strict=False,
    ):
        if panel is not axes[0]:
            panel.sharey(axes[0])
        curves(panel, records, contenders, shift=shift)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_yscale("log")
        drawing.plain_log(panel.yaxis)
        drawing.legend(panel)
    axes[0].set_ylabel("mean training loss of the epoch")
    reached = [final_loss(r) for c in CONTENDERS for r in at_best(records, c) if trained(r)]
    axes[0].set_ylim(bottom=0.8 * min(reached, default=1.0))  # one scale for the three
    sensitivity(axes[3], records, CONTENDERS)
    return figure
