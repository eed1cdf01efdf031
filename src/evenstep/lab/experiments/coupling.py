"""The coupling of App. D: constants taken from the very batch they rescale bias the step."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...math import change_of_variables as coordinates
from ..reading import Record
from .common import Figure, NotRun, Verdict, below, claim
from .fig2 import UNGUARDED
from .session import Session
from .tuning import Contender, at_best, doubled, losses, outcome, rates_table, tuned

INPUTS, UNITS, ATOMS = 4, 3, 200
SIZES = (2, 4, 8, 16, 32, 64)
EXAMPLES, AT_ONCE = 4_000_000, 100_000  # drawn for each batch size
TOLERANCE = 4.5  # standard errors between what is measured and the formula, at most
RUNNING = Contender("moments of earlier batches", "whitening", doubled(0.05, 5), UNGUARDED)
OWN = Contender("the batch's own moments", "whitening-own", doubled(0.05, 5), UNGUARDED)
BATCHES = {64: 10, 8: 1}  # batch size: epochs
IMAGES = 10_000  # of the training set
SETTING = (
    f"Bias: a layer with {INPUTS} inputs and {UNITS} units on {ATOMS} equally likely examples, skewed and correlated; "
    "for each batch size four million examples are drawn, and eq. 3's step is taken with the batch's own mean and "
    "with the exact one (α and β exact, as in the paper). Training: the paper's CNN without guards on 10,000 images, "
    "moments of the batch itself (mean and variance, as batch norm takes them) against those of earlier batches; batch "
    "64 for ten epochs and batch 8 for one; five stepsizes of factor 2 and one beyond an end if the best lies there; "
    "two seeds."
)


def population(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Equally likely examples: inputs [atoms, n] and gradients [atoms, m], skewed and correlated, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ATOMS, INPUTS, generator=generator, dtype=torch.float64).mul(0.7).exp()
    mixed = x @ torch.randn(INPUTS, UNITS, generator=generator, dtype=torch.float64)
    return x, torch.sin(mixed) + 0.5


def bias_step(x: Tensor, g: Tensor, mu: Tensor, alpha2: Tensor, beta2: Tensor) -> Tensor:
    """Eq. 3's δw_0j (before the sign) for one batch x [B, n], g [B, m], from the library's own functions."""
    c = coordinates.Scales(mu, alpha2.sqrt(), beta=beta2.sqrt())
    on_v = coordinates.weights_to_v(g.T @ x / len(x), coordinates.per_unit(g.mean(0)), c)
    return beta2 * g.mean(0) - coordinates.response(coordinates.scaled(on_v, c), mu)


def formula(x: Tensor, g: Tensor, size: int, alpha2: Tensor, beta2: Tensor) -> Tensor:
    """App. D's bias of δw_0j for B i.i.d. examples, exactly, from the whole population.

    Σ_i β_j² α_i² [μ_i cov(x_i, g_j)/B − (1 − 1/B)/B · E[(x_i − μ_i)² (g_j − E g_j)]]
    """
    dx, dg = x - x.mean(0), g - g.mean(0)
    first, third = dx.T @ dg / len(x), (dx * dx).T @ dg / len(x)
    return beta2 * (alpha2 @ (x.mean(0)[:, None] * first / size - (1 - 1 / size) / size * third))


def bias(size: int, examples: int, seed: int) -> list[dict[str, Any]]:
    """Measured and predicted bias of each unit's δw_0 at one batch size, and the unbiased step."""
    x, g = population(seed)
    alpha2, beta2 = 1 / x.var(0, correction=0), 1 / (g * g).mean(0)
    generator = torch.Generator().manual_seed(1000 * size + seed)
    steps = torch.func.vmap(bias_step, in_dims=(0, 0, 0, None, None))
    differences = []
    for start in range(0, examples, AT_ONCE):
        count = min(AT_ONCE, examples - start) // size
        rows = torch.randint(len(x), (count, size), generator=generator)
        bx, bg = x[rows], g[rows]
        exact = x.mean(0).expand(count, -1)
        differences.append(steps(bx, bg, bx.mean(1), alpha2, beta2) - steps(bx, bg, exact, alpha2, beta2))
    found = torch.cat(differences)
    columns = {
        "measured": found.mean(0),
        "standard_error": found.std(0) / math.sqrt(len(found)),
        "formula": formula(x, g, size, alpha2, beta2),
        "ideal_step": bias_step(x, g, x.mean(0), alpha2, beta2),
    }
    return [{"unit": j, **{name: column[j].item() for name, column in columns.items()}} for j in range(UNITS)]


def run(session: Session) -> list[Record]:
    """Records of the bias at each batch size, then of the trainings."""
    arrays, quick = session.images(IMAGES), session.options.quick
    examples, sizes = (40_000, SIZES[:2]) if quick else (EXAMPLES, SIZES)
    found: list[Record] = []
    for size in sizes:
        session.progress(f"bias at batch size {size}", len(found), len(sizes))
        config = {"experiment": "coupling", "part": "bias", "batch": size, "examples": examples}
        found.append(session.stored(config, partial(bias, size, examples, session.options.seed)))
    entrants = [
        (contender, {"batch_size": batch, "epochs": 1 if quick else epochs})
        for batch, epochs in BATCHES.items()
        for contender in (RUNNING, OWN)
    ]
    return found + tuned(session, entrants, arrays, seeds=2)


def biases(records: list[Record]) -> dict[int, list[dict[str, Any]]]:
    """The rows of each batch size."""
    return {r["config"]["batch"]: r["metrics"] for r in records if r["config"].get("part") == "bias"}


def trainings(records: list[Record], batch: int) -> list[Record]:
    """The trainings at one batch size."""
    return [r for r in records if r["config"].get("batch_size") == batch]


@claim("App. D", "A mean that is estimated on the current batch biases the step of the bias systematically.")
def measured(records: list[Record]) -> Verdict:
    """The bias against its formula."""
    rows = [row for group in biases(records).values() for row in group]
    if not rows:
        raise NotRun
    off = max(abs(row["measured"] - row["formula"]) / row["standard_error"] for row in rows)
    seen = max(abs(row["measured"]) / row["standard_error"] for row in rows)
    smallest = min(biases(records))
    share = max(abs(row["formula"] / row["ideal_step"]) for row in biases(records)[smallest])
    return Verdict(
        off < TOLERANCE < seen,
        f"Measured and predicted bias differ by at most {off:.1f} standard errors, while the bias itself is up to "
        f"{seen:.0f}; at batch size {smallest} it is up to {share:.0%} of the step.",
    )


@claim("App. D, §4.4", "In practice this is more than sufficient to severely disrupt convergence.")
def disrupted(records: list[Record]) -> Verdict:
    """Training with the batch's own moments against earlier ones; "severely" means a quarter more loss."""
    results, held = [], []
    for batch in BATCHES:
        mine = trainings(records, batch)
        running, own = at_best(mine, RUNNING), at_best(mine, OWN)
        if running and own:
            results.append(f"batch {batch}: {outcome(own)} with its own, {outcome(running)} with earlier ones")
            held.append(below([1.25 * loss for loss in losses(running)], losses(own)))
    text = f"Training loss at the best stepsize, {'; '.join(results)}." if results else "Not run."
    return Verdict(None if not held else True if all(held) else False if False in held else None, text)


CLAIMS = (measured, disrupted)


def table(records: list[Record]) -> list[list[str]]:
    """Head and rows for the docs: the trainings."""
    tables = {str(batch): rates_table(trainings(records, batch), (RUNNING, OWN)) for batch in BATCHES}
    head = next(iter(tables.values()))[0]
    return [["batch", *head], *([batch, *row] for batch, rows in tables.items() for row in rows[1:])]


def plot(records: list[Record]) -> Figure:
    """The bias against its formula, and training with and without it."""
    from .. import drawing
    from .panels import sensitivity

    figure, (left, *rest) = drawing.panels(1 + len(BATCHES), width=4.4)
    found = biases(records)
    for j in range(UNITS):
        rows = [found[size][j] for size in found]
        colour = drawing.COLOURS[j]
        left.plot(list(found), [row["formula"] for row in rows], color=colour, label=f"unit {j}, formula")
        error = [row["standard_error"] for row in rows]
        left.errorbar(list(found), [row["measured"] for row in rows], error, fmt="o", markersize=4, color=colour)
    left.set_xscale("log", base=2)
    left.set(xlabel="batch size", ylabel="bias of $\\delta w_{0j}$")
    drawing.legend(left)
    for panel, batch in zip(rest, BATCHES, strict=True):
        sensitivity(panel, trainings(records, batch), (RUNNING, OWN), shift=3)
        panel.set_title(f"batch {batch}: final training loss", loc="left", fontsize=10)
        drawing.legend(panel)
    return figure
