"""More examples (§4.3): whitening does well on a tenth of the images and, says the paper, badly on all of them."""

from pathlib import Path
from typing import Any

import torch

from ..data import Arrays
from ..records import Record
from .common import Claim, Figure, Options, Progress, Verdict, below, images, only, silent
from .fig2 import UNGUARDED
from .tuning import Contender, Entrant, Plan, at_best, doubled, losses, outcome, rates_table, tuned

SG = Contender("SG", "sg", doubled(0.05, 4))
BATCH_NORM = Contender("SG + batch norm", "batch-norm", doubled(0.05, 4))
WHITENING = Contender("whitening (the paper's)", "whitening", doubled(0.4, 4), UNGUARDED)
GUARDED = Contender("whitening, guarded", "whitening", doubled(0.8, 4))
UNITSTEP = Contender("UnitStep", "unitstep", doubled(0.0125, 4))
CONTENDERS = (SG, BATCH_NORM, WHITENING, GUARDED, UNITSTEP)
SHARE = 10  # the small set is one in so many, as 100,000 of ImageNet's million
EPOCHS = 2  # over the whole set; the small one gets as many steps
SETTING = (
    "The paper: AlexNet on 100,000 images of ImageNet, and on all of its million at 224x224 with 1,000 classes. Here, "
    "scaled down to minutes: eight layers in AlexNet's proportions (width 48, no dropout, He's first weights) on "
    "images at 32x32 with random crops and flips, on a tenth of the set and on all of it, batch 128, constant "
    f"stepsize, the same number of steps on both ({EPOCHS} epochs of the whole set). Tiny-ImageNet has 100,000 images "
    "of 200 classes, so that our whole set is as large as the paper's small one: this asks whether ten times the "
    "examples change the picture, not whether a million do. Four stepsizes of factor 2, and a fifth beyond an end if "
    "the best lies there; two seeds."
)


def run(options: Options, out: Path, device: torch.device | str = "cpu", progress: Progress = silent) -> list[Record]:
    """Records of all contenders on both sets."""
    whole = images(options, device, many=True)
    small = whole.subset(len(whole.train_y) // SHARE)
    only(out, [whole, small])
    plan = Plan(seeds=1, growth=0, thin=1) if options.quick else Plan(seeds=2)
    found: list[Record] = []
    for arrays, epochs in ((small, SHARE * EPOCHS), (whole, EPOCHS)):
        settings = settings_for(arrays, epochs, options.quick)
        entrants = [Entrant(contender, settings) for contender in CONTENDERS]
        found += tuned(entrants, plan, arrays, out, device=device, progress=progress, seed=options.seed)
    return found


def settings_for(arrays: Arrays, epochs: int, quick: bool) -> dict[str, Any]:
    """The settings that all runs on one set share."""
    size = {"width": 4} if quick else {}
    options = {**size, "classes": len(arrays.classes)}
    batch, epochs = (32, max(1, epochs // EPOCHS)) if quick else (128, epochs)
    return {"model": "alexnet", "model_options": options, "epochs": epochs, "batch_size": batch, "augment": True}


def halves(records: list[Record]) -> tuple[list[Record], list[Record]]:
    """The runs on the small set, and those on the whole one."""
    longest = max((r["config"]["epochs"] for r in records), default=0)
    small = [r for r in records if r["config"]["epochs"] == longest]
    return small, [r for r in records if r["config"]["epochs"] < longest]


def summary(records: list[Record]) -> str:
    """All contenders on one set, in a line."""
    shown = [(c.label, at_best(records, c)) for c in CONTENDERS]
    return ", ".join(f"{label} {outcome(best)}" for label, best in shown if best)


def few(records: list[Record]) -> Verdict:
    """On the small set, whitening against batch norm and SG."""
    small, _ = halves(records)
    ours = losses(at_best(small, WHITENING))
    wins = [below(ours, losses(at_best(small, rival))) for rival in (SG, BATCH_NORM)]
    held = False if False in wins else None if None in wins else True
    return Verdict(held, f"Training loss on {_name(small)}: {summary(small)}.")


def many(records: list[Record]) -> Verdict:
    """On the whole set, whitening against SG."""
    _, whole = halves(records)
    held = below(losses(at_best(whole, SG)), losses(at_best(whole, WHITENING)))
    return Verdict(held, f"Training loss on {_name(whole)}: {summary(whole)}.")


def _name(records: list[Record]) -> str:
    return records[0]["config"]["data"] if records else "nothing"


def table(records: list[Record]) -> list[list[str]]:
    """Head and rows for the docs, both sets."""
    small, whole = (rates_table(half, CONTENDERS) for half in halves(records))
    named = [["images", *small[0]]]
    for name, rows in (("a tenth", small[1:]), ("all", whole[1:])):
        named += [[name, *row] for row in rows]
    return named


CLAIMS = (
    Claim("§4.3", "With 100,000 examples whitening reliably trains as on CIFAR-10: below batch norm and SG.", few),
    Claim("§4.3", "With all examples it does very badly, not even reaching plain SG's best training loss.", many),
)


def plot(records: list[Record]) -> Figure:
    """Training loss on both sets, and what each stepsize gives."""
    from .. import drawing
    from .panels import curves, sensitivity

    figure, axes = drawing.panels(4, width=4.2)
    for k, (half, name) in enumerate(zip(halves(records), ("a tenth of the images", "all images"), strict=True)):
        curves(axes[k], half, CONTENDERS)
        sensitivity(axes[2 + k], half, CONTENDERS)
        axes[k].set_title(name, loc="left", fontsize=10)
        axes[2 + k].set_title(f"{name}: final loss by stepsize", loc="left", fontsize=10)
        axes[k].set_ylabel("mean training loss of the epoch")
        drawing.legend(axes[k])
    return figure
