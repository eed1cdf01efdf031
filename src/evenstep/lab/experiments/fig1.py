"""Figure 1: a benign function on which one stepsize for all directions is a bad idea (§3.1).

F(w₁, w₂) = ½ w₁² + log(e^w₂ + e^−w₂), descended from (3, 3) by SG, by Newton's method with a stepsize γ (eq. 8), by
eq. 9 (one trust radius) and by eq. 10 (one per block). G is the Hessian, each coordinate a block.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...math import stepsize
from ..reading import Record
from .common import Figure, NotRun, Verdict, claim
from .session import Session

START = (3.0, 3.0)
STEPS = 100
NEAR = 0.5  # how close to the optimum counts as there
GAMMA = 0.03  # the paper's, which takes Newton's method to w₂ ≈ 0 in one step
ETA = 0.3  # so that the first steps of eqs. 9 and 10 are about as long as Newton's with γ = 0.03
SG, NEWTON, RADIUS, RADII = "SG", "Newton, γ (eq. 8)", "one radius (eq. 9)", "a radius per block (eq. 10)"
METHODS = {SG: {"stepsize": 0.3}, NEWTON: {"gamma": GAMMA}, RADIUS: {"eta": ETA}, RADII: {"eta": ETA}}
SETTING = (
    f"Exact gradients and Hessians in float64, {STEPS} steps from (3, 3). γ = {GAMMA} is the paper's; η = {ETA} "
    "makes the first steps of eqs. 9 and 10 about as long."
)


def value(w: Tensor) -> Tensor:
    """F, eq. 6, without overflow."""
    return 0.5 * w[0] ** 2 + torch.logaddexp(w[1], -w[1])


def gradient(w: Tensor) -> Tensor:
    """∇F = (w₁, tanh w₂)."""
    return torch.stack([w[0], torch.tanh(w[1])])


def natural(w: Tensor) -> Tensor:
    """(∇²F)⁻¹∇F = (w₁, sinh w₂ cosh w₂), the Hessian being diag(1, cosh⁻² w₂)."""
    return torch.stack([w[0], torch.sinh(w[1]) * torch.cosh(w[1])])


def step(method: str, w: Tensor) -> Tensor:
    """The step of one method at w."""
    grad, newton = gradient(w), natural(w)
    if method == SG:
        return -METHODS[SG]["stepsize"] * grad
    if method == NEWTON:
        return stepsize.natural_step(newton, GAMMA)
    if method == RADII:
        return stepsize.trust_step(grad[:, None], newton[:, None], ETA, dim=1)[:, 0]
    return stepsize.trust_step(grad, newton, ETA)


def trajectory(method: str, steps: int = STEPS) -> list[dict[str, Any]]:
    """The points that a method visits from (3, 3)."""
    w = torch.tensor(START, dtype=torch.float64)
    rows = []
    for number in range(steps + 1):
        rows.append({"step": number, "w1": w[0].item(), "w2": w[1].item(), "value": value(w).item()})
        w = w + step(method, w)
    return rows


def run(session: Session) -> list[Record]:
    """A record per method."""
    session.progress("trajectories", 0, len(METHODS))
    same = {"experiment": "fig1", "start": START, "seed": 0}
    return [session.stored({**same, "name": name, **how}, partial(trajectory, name)) for name, how in METHODS.items()]


def by_method(records: list[Record]) -> dict[str, Record]:
    """The records by method."""
    found = {r["config"]["name"]: r for r in records}
    if not found.keys() >= METHODS.keys():
        raise NotRun
    return found


def arrival(record: Record) -> float:
    """The first step at which the method is near the optimum; infinite if it never is."""
    near = (row["step"] for row in record["metrics"] if math.hypot(row["w1"], row["w2"]) <= NEAR)
    return next(near, math.inf)


def steps(record: Record, over: str) -> str:
    """The number of steps until then, in words."""
    count = arrival(record)
    return str(count) if count < math.inf else f"{over}{STEPS}"


def angle(record: Record) -> float:
    """Degrees between a method's first step and the way to the optimum."""
    first, second = record["metrics"][:2]
    moved = math.atan2(second["w2"] - first["w2"], second["w1"] - first["w1"])
    return abs(math.degrees(moved - math.atan2(-first["w2"], -first["w1"])))


@claim(
    "§3.1, fig. 1",
    "From (3, 3) the negative gradient points slightly away from the optimum, Newton's direction substantially",
    "more; it needs γ ≈ 0.03, leads to (2.9, 0), and is then far too small.",
)
def direction(records: list[Record]) -> Verdict:
    """The first directions of SG and of Newton's method, and the point the latter reaches."""
    found = by_method(records)
    sg, newton = angle(found[SG]), angle(found[NEWTON])
    landed = found[NEWTON]["metrics"][1]
    held = 0 < sg < newton and abs(landed["w1"] - 2.9) < 0.05 and abs(landed["w2"]) < 0.05
    return Verdict(
        held,
        f"SG's first step is {sg:.0f}° off the way to the optimum, Newton's {newton:.0f}°; γ = {GAMMA} leads to "
        f"({landed['w1']:.2f}, {landed['w2']:.2f}), where γ = 1 would be right: {1 / GAMMA:.0f} times as much (the "
        "paper says ten).",
    )


@claim(
    "§3.1–3.3",
    "A stepsize that follows the curvature (eq. 9), for each block apart (eq. 10), does not wait for the worst",
    "curvature met.",
)
def lessons(records: list[Record]) -> Verdict:
    """Steps until each method is near the optimum."""
    found = by_method(records)
    counts = {name: arrival(record) for name, record in found.items()}
    held = max(counts[RADIUS], counts[RADII]) < counts[NEWTON] / 2
    shown = ", ".join(f"{name} {steps(record, 'over ')}" for name, record in found.items())
    return Verdict(held, f"Steps to within {NEAR} of the optimum: {shown}.")


CLAIMS = (direction, lessons)


def table(records: list[Record]) -> list[list[str]]:
    """Head and rows for the docs."""
    head = ["method", f"steps to within {NEAR}", f"F after {STEPS} steps (least: {math.log(2):.4f})"]
    last = [f"{r['metrics'][-1]['value']:.4f}" for r in records]
    return [head, *([r["config"]["name"], steps(r, "> "), end] for r, end in zip(records, last, strict=True))]


def plot(records: list[Record]) -> Figure:
    """The function with the trajectories on it, and its value against steps."""
    from .. import drawing

    figure, (plane, values) = drawing.panels(2, width=5.0)
    side = torch.linspace(-0.8, 3.4, 120, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"))
    plane.contour(side, side, value(grid), levels=18, colors="0.75", linewidths=0.6)
    for k, record in enumerate(records):
        rows: list[dict[str, float]] = record["metrics"]
        style: dict[str, Any] = {"color": drawing.COLOURS[k], "label": record["config"]["name"]}
        mark: dict[str, Any] = {"marker": drawing.MARKS[k], "markersize": 3}
        plane.plot([r["w1"] for r in rows], [r["w2"] for r in rows], linewidth=1, **style, **mark)
        values.plot([r["step"] for r in rows], [r["value"] - math.log(2) for r in rows], linewidth=1.5, **style)
    plane.set(xlim=(-0.8, 3.4), ylim=(-0.8, 3.4), xlabel="$w_1$", ylabel="$w_2$")
    values.set_yscale("log")
    values.set(xlabel="step", ylabel="F above its least value", ylim=(1e-7, 20))
    drawing.legend(values)
    return figure
