"""Figure 2: the paper's CNN on CIFAR-10, every method at its best constant stepsize (§3.5, §4.2; §2.4 besides)."""

import math
import statistics

from ..reading import Record
from ..summary import final_loss
from .common import Figure, NotRun, Verdict, below, claim
from .session import Session
from .tuning import (
    Contender,
    at_best,
    best_losses,
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
SETTING = (
    "C6(5x5)-P-C16(5x5)-P-F120-F84-F10, PyTorch's first weights, batch 64, 40 epochs, constant stepsize: the lowest "
    "training loss of the last epoch on one seed, from seven stepsizes of factor 2, and an eighth beyond an end if the "
    "best lies there; then two further seeds. The paper's own methods run without guards (damping 0.1 is our reading "
    'of its "suitable range"); guarded whitening, guarded canonical scaling and `UnitStep` are our addition.'
)


def settings(session: Session) -> dict[str, int]:
    """The settings of every training."""
    return {"epochs": 2 if session.options.quick else 40, "batch_size": 64}


def run(session: Session) -> list[Record]:
    """Records of all contenders."""
    return tuned(session, [(contender, settings(session)) for contender in CONTENDERS], session.images())


def summary(records: list[Record], contender: Contender) -> str:
    """A contender's final loss and stepsize in a few words."""
    best = at_best(records, contender)
    return f"{contender.label} {outcome(best)}" + (f" at {best[0]['config']['lr']:g}" if best else "")


def share(records: list[Record], one: Contender, other: Contender) -> tuple[bool | None, float, str]:
    """Whether one contender's losses are below the other's, the ratio of their means, and both in words."""
    ours, theirs = best_losses(records, one), best_losses(records, other)
    ratio = statistics.fmean(ours) / statistics.fmean(theirs) if ours and theirs else math.nan
    portion = f": {ratio:.0%} of its loss" if 0 < ratio < math.inf else ""  # none where a mean is not finite
    return below(ours, theirs), ratio, f"{summary(records, one)}, {summary(records, other)}{portion}"


@claim("§3.5, fig. 2 left", "Dividing the stepsize by √(n·S) trains better than a global stepsize.")
def left(records: list[Record]) -> Verdict:
    """SG divided by √(n·S) against SG."""
    held = below(best_losses(records, FAN_IN), best_losses(records, SG))
    verb = {True: "Lower", False: "Not lower", None: "Within the spread of seeds"}[held]
    return Verdict(
        held, f"{verb}: {summary(records, FAN_IN)}, {summary(records, SG)} (training loss of the last epoch)."
    )


@claim("§4.2, fig. 2 right", "Batch norm is a slight improvement over plain SG.")
def slightly(records: list[Record]) -> Verdict:
    """Batch norm against SG: a slight improvement leaves more than half of the loss."""
    lower, ratio, text = share(records, BATCH_NORM, SG)
    if lower and ratio <= 0.5:
        return Verdict(None, f"{text} (more than slightly).")
    return Verdict(lower, f"{text}.")


@claim("§4.2, fig. 2 right", "Whitening quickly drives the training loss far below batch norm's.")
def right(records: list[Record]) -> Verdict:
    """Whitening against batch norm: far below is at most half of its loss."""
    lower, ratio, text = share(records, WHITENING, BATCH_NORM)
    added = "; ".join(summary(records, c) for c in OURS if c.runs_in(records))
    if lower and ratio > 0.5:
        return Verdict(None, f"{text} (lower, but not far). Ours: {added}.")
    return Verdict(lower, f"{text}. Ours: {added}.")


@claim(
    "§2.4",
    "Canonical scaling competes with the best known methods, but diverges with little warning at larger",
    "stepsizes.",
)
def canonical(records: list[Record]) -> Verdict:
    """Canonical scaling: as good as the best, and how soon beyond its best stepsize it fails."""
    mine = CANONICAL.runs_in(records)
    rivals = [at_best(records, c) for c in (SG, BATCH_NORM) if c.runs_in(records)]
    if not mine or not rivals:
        raise NotRun
    better = min(rivals, key=lambda runs: min(losses(runs)))
    fast = below(best_losses(records, CANONICAL), losses(better))
    best, failure = best_rate(mine), first_failure(records, CANONICAL)
    text = f"{summary(records, CANONICAL)}, the better of SG and batch norm {outcome(better)}. "
    if failure is None or failure <= best:
        stepsizes = "no stepsize" if failure is None else "every stepsize"
        return Verdict(None if fast else fast, f"{text}It failed at {stepsizes} tried.")
    warned = [r for r in mine if best <= r["config"]["lr"] < failure and trained(r)]
    return Verdict(
        None if fast is None else fast and failure / best <= 4.1,
        f"{text}It fails from {failure:g} on, {failure / best:.3g} times its best stepsize; the one before that still "
        f"had {final_loss(max(warned, key=lambda r: r['config']['lr'])):.3f}; {summary(records, GUARDED_CANONICAL)}.",
    )


CLAIMS = (left, slightly, right, canonical)


def table(records: list[Record]) -> list[list[str]]:
    """Head and rows for the docs."""
    return rates_table(records, CONTENDERS)


def plot(records: list[Record]) -> Figure:
    """The paper's two panels, ours beside them, and what each stepsize gives."""
    from .. import drawing
    from .panels import sensitivity, training

    figure, (first, *others, last) = drawing.panels(4, width=4.2)
    for panel, contenders, shift, title in (
        (first, (SG, FAN_IN), 0, "SG, with and without ÷ √(n·S)"),
        (others[0], (BATCH_NORM, WHITENING, CANONICAL), 2, "batch norm against whitening"),
        (others[1], OURS, 5, "ours"),
    ):
        if panel is not first:
            panel.sharey(first)
        training(panel, records, contenders, shift)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_yscale("log")
        drawing.plain_log(panel.yaxis)
        drawing.legend(panel)
    first.set_ylabel("mean training loss of the epoch")
    reached = [final_loss(r) for c in CONTENDERS for r in at_best(records, c) if trained(r)]
    first.set_ylim(bottom=0.8 * min(reached, default=1.0))  # one scale for the three
    sensitivity(last, records, CONTENDERS)
    return figure
