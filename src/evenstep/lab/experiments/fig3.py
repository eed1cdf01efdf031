"""Figure 3 (App. E): batch norm for the first epoch, folded into the weights, then whitening; against batch norm alone.

As in the paper's figure the training loss is measured after each epoch by a full sweep of the training set. Each run
has the device to itself, so that its seconds mean something.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch

import evenstep

from .. import trial
from ..data import Arrays
from ..evaluate import evaluate
from ..parallel_trials import WARM_UP, side_stream
from ..reading import Record
from ..train import Training
from ..trial import Trial
from .common import Figure, NotRun, Verdict, claim, failures_expected
from .fig2 import UNGUARDED
from .scale import network
from .session import Session
from .tuning import guessing

EPOCHS, BATCH = 4, 128
BATCH_NORM, RATES = "batch norm throughout", (0.1, 0.2, 0.4)
WHITENING = "then whitening (the paper's)"
AFTERWARDS: dict[str, tuple[str, dict[str, Any], tuple[float, ...]]] = {
    WHITENING: ("whitening", UNGUARDED, (0.4, 0.8, 1.6)),
    "then whitening, guarded": ("whitening", {}, (1.6, 3.2)),
    "then UnitStep": ("unitstep", {}, (0.025, 0.05)),
}
CLOSE = 1.05  # of the loss: what counts as similar per epoch
SETTING = (
    "The paper: AlexNet on ImageNet. Here the AlexNet-like network of the scaling experiment on the same images, crops "
    f"and flips, batch {BATCH}, constant stepsize, {EPOCHS} epochs; the best of three stepsizes of batch norm (plain "
    "SG) serves the first epoch of all, and each way to go on takes the best of its own, by the loss in the end. One "
    "seed. "
    "Seconds are those of training steps as CUDA graphs, without the capture."
)


def train(first: Trial, then: Trial | None, arrays: Arrays, swept: Arrays) -> list[dict[str, Any]]:
    """A row per epoch: `first` for one epoch, then `then` on the folded network; or `first` throughout.

    The test set of `swept` are the images to be swept after each epoch.
    """
    device, rows = arrays.train_x.device, list[dict[str, Any]]()
    training = trial.start(first, arrays, device, capture=True)
    for number in range(first.epochs):
        if number == 1 and then is not None:
            order, folded = training.order, evenstep.fold_batchnorm(training.model)
            training = trial.start(then, arrays, device, capture=True, model=folded)
            training.order = order
        seconds = epoch_seconds(training, len(arrays.train_y))
        swept_loss = evaluate(training.model, swept)["test_loss"]
        rows.append({"epoch": number + 1, "seconds": seconds, "swept_loss": swept_loss})
        rows[-1] |= evaluate(training.model, arrays)
    return rows


def epoch_seconds(training: Training, examples: int) -> float:
    """Train one epoch of whole batches; its seconds as if the first steps, where a GPU captures, were usual ones."""
    steps = examples // training.batch_size
    settled, start = min(WARM_UP + 2, steps - 1), time.perf_counter()
    for k, _ in enumerate(islice(training.epoch(), steps), start=1):
        if k == settled:
            wait(training.device)
            start = time.perf_counter()
    wait(training.device)
    return (time.perf_counter() - start) * steps / (steps - settled)


def wait(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(session: Session) -> list[Record]:
    """Records of batch norm at each stepsize, then of each way to go on at each of its stepsizes."""
    arrays, quick = session.images(many=True), session.options.quick
    swept = replace(arrays, test_x=arrays.train_x, test_y=arrays.train_y)
    base = network(arrays, quick) | {"seed": session.options.seed}
    base |= {"epochs": 2, "batch_size": 64} if quick else {"epochs": EPOCHS, "batch_size": BATCH}
    ways = {name: (*way[:2], way[2][:1] if quick else way[2]) for name, way in AFTERWARDS.items()}
    rates = RATES[1:2] if quick else RATES
    total = len(rates) + sum(len(way[2]) for way in ways.values())
    found: list[Record] = []

    def one(name: str, first: Trial, then: Trial | None) -> None:
        session.progress(f"{name}, stepsize {(then or first).lr:g}", len(found), total)
        config = {"experiment": "fig3", "name": name, "first": asdict(first), "then": then and asdict(then)}
        with failures_expected(), side_stream(session.device):
            found.append(session.stored(config, partial(train, first, then, arrays, swept), arrays))

    for lr in rates:
        one(BATCH_NORM, Trial("batch-norm", lr, **base), None)
    first = Trial(**best(found, BATCH_NORM)["config"]["first"])
    for name, (method, keywords, grid) in ways.items():
        for lr in grid:
            one(name, first, Trial(method, lr, options=keywords, **base))
    return found


def last_loss(record: Record) -> float:
    """Loss of the whole training set after the last epoch; infinite if not finite, or above guessing."""
    loss, first = record["metrics"][-1]["swept_loss"], {"config": record["config"]["first"]}
    return math.inf if loss is None or loss > guessing(first) else loss


def best(records: list[Record], name: str) -> Record:
    """The run of that name with the lowest loss in the end."""
    return min((r for r in records if r["config"]["name"] == name), key=last_loss)


def best_runs(records: list[Record]) -> dict[str, Record]:
    """The best run of each name that has one."""
    return {name: best(records, name) for name in dict.fromkeys(r["config"]["name"] for r in records)}


def pace(record: Record) -> float:
    """Seconds per epoch from the second on."""
    rows = record["metrics"][1:]
    return sum(row["seconds"] for row in rows) / len(rows)


def outcomes(records: list[Record], number: Callable[[Record], float]) -> dict[str, float]:
    """A number of the best run of each name."""
    found = {name: number(run) for name, run in best_runs(records).items()}
    if not found.keys() >= {BATCH_NORM, *AFTERWARDS}:
        raise NotRun
    return found


@claim("App. E, fig. 3", "Batch norm for one epoch, then whitening: like batch norm throughout per epoch.")
def per_epoch(records: list[Record]) -> Verdict:
    """The loss in the end, whitening without guards against batch norm."""
    ends = outcomes(records, last_loss)
    text = ", ".join(f"{name} {loss:.3f}" for name, loss in ends.items())
    held = None if ends[BATCH_NORM] == ends[WHITENING] == math.inf else ends[WHITENING] <= CLOSE * ends[BATCH_NORM]
    return Verdict(held, f"Loss of the whole training set after the last epoch: {text}.")


@claim("App. E, fig. 3", "Per second the whitening that follows is faster than batch norm.")
def per_second(records: list[Record]) -> Verdict:
    """Seconds per epoch."""
    paces = outcomes(records, pace)
    text = ", ".join(f"{name} {seconds:.2f}" for name, seconds in paces.items())
    return Verdict(paces[WHITENING] < paces[BATCH_NORM], f"Seconds per epoch from the second on: {text}.")


CLAIMS = (per_epoch, per_second)


def table(records: list[Record]) -> list[list[str]]:
    """Head and rows for the docs."""
    rows = [["", "stepsize", "training loss (full sweep)", "test accuracy", "dead units", "seconds per epoch"]]
    for name, run in best_runs(records).items():
        last, lr = run["metrics"][-1], (run["config"]["then"] or run["config"]["first"])["lr"]
        shares = f"{last['test_accuracy']:.3f}", f"{last['dead_share']:.1%}"
        rows.append([name, f"{lr:g}", f"{last_loss(run):.3f}", *shares, f"{pace(run):.2f}"])
    return rows


def plot(records: list[Record]) -> Figure:
    """The loss of the whole training set by epochs and by seconds."""
    from .. import drawing

    figure, (epochs, seconds) = drawing.panels(2)
    for k, (name, run) in enumerate(best_runs(records).items()):
        rows, style = run["metrics"], drawing.style(k, name)
        losses = [row["swept_loss"] for row in rows]
        epochs.plot([row["epoch"] for row in rows], losses, **style)
        seconds.plot(list(accumulate(row["seconds"] for row in rows)), losses, **style)
    drawing.epoch_axis(epochs)
    epochs.set_ylabel("loss of the whole training set")
    seconds.set(xlabel="seconds of training")
    drawing.legend(epochs)
    return figure
