"""More examples (§4.3): whitening does well on a tenth of the images and, says the paper, badly on all of them."""

from typing import Any

from ..data import Arrays
from ..reading import Record
from .common import Figure, Verdict, below, claim
from .fig2 import UNGUARDED
from .session import Session, images
from .tuning import Contender, at_best, best_losses, doubled, outcome, rates_table, tuned

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


def run(session: Session) -> list[Record]:
    """Records of all contenders on both sets."""
    whole = images(session.options, session.device, many=True)
    small = whole.subset(len(whole.train_y) // SHARE)
    session.only(whole, small)
    found: list[Record] = []
    for arrays, epochs in ((small, SHARE * EPOCHS), (whole, EPOCHS)):
        settings = network(arrays, session.options.quick) | {"epochs": epochs, "batch_size": 128}
        if session.options.quick:
            settings |= {"epochs": epochs // EPOCHS, "batch_size": 32}
        found += tuned(session, [(contender, settings) for contender in CONTENDERS], arrays, seeds=2)
    return found


def network(arrays: Arrays, quick: bool) -> dict[str, Any]:
    """The settings of the AlexNet-like network and its images."""
    size = {"width": 4} if quick else {}
    return {"model": "alexnet", "model_options": {**size, "classes": len(arrays.classes)}, "augment": True}


def halves(records: list[Record]) -> tuple[list[Record], list[Record]]:
    """The runs on the small set, and those on the whole one."""
    longest = max((r["config"]["epochs"] for r in records), default=0)
    small = [r for r in records if r["config"]["epochs"] == longest]
    return small, [r for r in records if r["config"]["epochs"] < longest]


def summary(records: list[Record]) -> str:
    """All contenders on one set, in a line."""
    shown = [(c.label, at_best(records, c)) for c in CONTENDERS]
    return ", ".join(f"{label} {outcome(best)}" for label, best in shown if best)


def on_set(records: list[Record], held: bool | None) -> Verdict:
    """The verdict on runs on one set, with their losses."""
    name = records[0]["config"]["data"] if records else "nothing"
    return Verdict(held, f"Training loss on {name}: {summary(records)}.")


@claim("§4.3", "With 100,000 examples whitening reliably trains as on CIFAR-10: below batch norm and SG.")
def few(records: list[Record]) -> Verdict:
    """On the small set, whitening against batch norm and SG."""
    small, _ = halves(records)
    ours = best_losses(small, WHITENING)
    wins = [below(ours, best_losses(small, rival)) for rival in (SG, BATCH_NORM)]
    return on_set(small, False if False in wins else None if None in wins else True)


@claim("§4.3", "With all examples it does very badly, not even reaching plain SG's best training loss.")
def many(records: list[Record]) -> Verdict:
    """On the whole set, whitening against SG."""
    _, whole = halves(records)
    return on_set(whole, below(best_losses(whole, SG), best_losses(whole, WHITENING)))


CLAIMS = (few, many)


def table(records: list[Record]) -> list[list[str]]:
    """Head and rows for the docs, both sets."""
    tables = [rates_table(half, CONTENDERS) for half in halves(records)]
    named = zip(("a tenth", "all"), tables, strict=True)
    return [["images", *tables[0][0]], *([name, *row] for name, rows in named for row in rows[1:])]


def plot(records: list[Record]) -> Figure:
    """Training loss on both sets, and what each stepsize gives."""
    from .. import drawing
    from .panels import sensitivity, training

    figure, axes = drawing.panels(4, width=4.2)
    for k, (half, name) in enumerate(zip(halves(records), ("a tenth of the images", "all images"), strict=True)):
        training(axes[k], half, CONTENDERS)
        sensitivity(axes[2 + k], half, CONTENDERS)
        axes[k].set_title(name, loc="left", fontsize=10)
        axes[2 + k].set_title(f"{name}: final loss by stepsize", loc="left", fontsize=10)
        axes[k].set_ylabel("mean training loss of the epoch")
        drawing.legend(axes[k])
    return figure
