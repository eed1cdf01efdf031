"""What an optimizer would do to a model: which parameters it whitens, advice, memory of its state, time of a step."""

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import evenstep

from .bench import quartiles, seconds_per_step

WARM_UP, LEAST, SECONDS, MOST = 3, 5, 4.0, 50  # untimed rounds; timed ones at least, for how long, and at most
NOISY = 0.25  # half of a quiet machine's times lie within so much of each other
CONTENDERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-6),
    "EvenStep": lambda model: evenstep.EvenStep(model, lr=1e-6, plain_lr=1e-6),
    "UnitStep": lambda model: evenstep.UnitStep(model, lr=1e-6),
}
Call = Callable[[nn.Module], Tensor]  # a forward pass that ends in a loss
RECURRENT, NORMS = (nn.LSTM, nn.GRU, nn.RNN, nn.RNNCellBase), nn.modules.batchnorm._BatchNorm


def coverage(model: nn.Module, call: Call | None) -> evenstep.Coverage:
    """How EvenStep treats each parameter; after a step on a copy, where there is a call, which shows what is seen."""
    model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is covered")  # which `advice` says in its own words
        optimizer = CONTENDERS["EvenStep"](model)
    if call is not None:
        step(call, model, optimizer)
    found: evenstep.Coverage = optimizer.coverage()  # type: ignore[attr-defined]
    return found


def shares(model: nn.Module, rows: evenstep.Coverage) -> dict[str, tuple[int, str]]:
    """The number of parameters treated in each way, and the kinds of their layers, by decreasing number."""
    sizes, found = {name: p.numel() for name, p in model.named_parameters()}, dict[str, tuple[int, list[str]]]()
    for row in rows:
        steps = "" if row.treatment == "frozen" else ", AdamW" if "AdamW" in row.reason else ", orthogonal steps"
        count, layers = found.get(row.treatment + steps, (0, []))
        found[row.treatment + steps] = count + sizes.get(row.parameter, 0), [*layers, row.layer]
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    return {how: (count, ", ".join(dict.fromkeys(filter(None, layers)))) for how, (count, layers) in ordered}


def advice(model: nn.Module, rows: evenstep.Coverage) -> list[str]:
    """What to know or do about this kind of network, a sentence or two each."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    total, frozen = max(1, sum(sizes.values())), sum(p.numel() for p in model.parameters() if not p.requires_grad)

    def share(cls: Any) -> float:
        mine = {id(p): p.numel() for m in model.modules() if isinstance(m, cls) for p in m.parameters()}
        return sum(mine.values()) / total

    embedded, normed, recurrent = share(nn.Embedding), share(NORMS), share(RECURRENT)
    own = {type(m).__name__ for m in model.modules() if not type(m).__module__.startswith("torch.")}
    unknown = [row for row in rows if row.layer in own and ("no whitened" in row.reason or "of its own" in row.reason)]
    plain = sum(sizes.get(row.parameter, 0) for row in unknown) / total
    lora = any("lora_" in name for name in sizes)
    found = {
        f"{'LoRA' if lora else 'Fine-tuning'}: {frozen / total:.0%} of the parameters are frozen. Fine-tuning wants "
        "smaller steps than training from scratch: begin lower, as in evenstep tune FILE --lr 0.002.": (
            lora or frozen > total / 2
        ),
        f"Like a GPT: AdamW moves the embeddings ({embedded:.0%} of the parameters) and norms, at plain_lr=0.003. If "
        "you know an AdamW lr that is good for this network, give it as plain_lr.": embedded > 0 and not recurrent,
        f"Batch norm ({normed:.0%} of the parameters) is moved by AdamW, and may stay. EvenStep can train without: "
        "try that where batches are small, or outputs must not depend on the batch.": normed > 0,
        f"Recurrent layers ({recurrent:.0%} of the parameters) are not whitened but moved by AdamW, at plain_lr=0.003; "
        "expect about AdamW's result. Compare: evenstep sweep FILE --methods EvenStep AdamW.": recurrent > 0,
        f"Layers of your own ({', '.join({row.layer: 0 for row in unknown})}: {plain:.0%} of the parameters) are moved "
        "by AdamW. Build their products from nn.Linear, or teach evenstep by register_layer.": plain > 0.05,
        "Some weights are computed from others (weight norm, spectral norm); their layers are not whitened.": any(
            "computed from other parameters" in row.reason for row in rows
        ),
        "Nothing here is whitened: EvenStep is AdamW for this network, and will be no better.": not any(
            row.treatment == "whitened" for row in rows
        ),
    }
    return [sentence for sentence, holds in found.items() if holds]


def state_floats(model: nn.Module) -> dict[str, float]:
    """Numbers that optimizers keep for each trained parameter."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = {"SGD": 0.0, "SGD with momentum": 1.0, "AdamW": 2.0}
    for name in ("EvenStep", "UnitStep"):
        network = copy.deepcopy(model)
        for p in network.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(saw no input|is covered)")
            optimizer = CONTENDERS[name](network)
            optimizer.step()
        kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        found[name] = sum(t.numel() for t in kept) / trained
    return found


def step(call: Call, model: nn.Module, optimizer: Optimizer) -> None:
    """One training step."""
    optimizer.zero_grad(set_to_none=True)
    call(model).backward()
    optimizer.step()


def measure(model: nn.Module, call: Call, device: torch.device, seconds: float = SECONDS) -> dict[str, list[float]]:
    """Seconds of steps of each optimizer, round by round, on copies of the model."""
    copies = {name: copy.deepcopy(model) for name in CONTENDERS}
    takers = {name: partial(step, call, copies[name], build(copies[name])) for name, build in CONTENDERS.items()}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    started = time.perf_counter()
    while (done := len(times["AdamW"]) - WARM_UP) < LEAST or (time.perf_counter() - started < seconds and done < MOST):
        for name, take in takers.items():
            times[name].append(seconds_per_step(take, device, 1))
    return {name: taken[WARM_UP:] for name, taken in times.items()}


def timing(times: Mapping[str, Sequence[float]]) -> list[str]:
    """The times in lines: median, ratio to SGD with its quartiles, and a remark if the machine is too noisy."""
    base = times["SGD with momentum"]
    lines = [f"Time of a step: median of {len(base)}, all in turn; ratio to SGD, with its quartiles"]
    for name, taken in times.items():
        low, middle, high = quartiles(taken, base)
        lines.append(f"  {name:<20}{1e3 * statistics.median(taken):>10.2f} ms{middle:>8.2f} ({low:.2f} to {high:.2f})")
    low, middle, high = statistics.quantiles(base, n=4)
    if high - low > NOISY * middle:
        lines.append(
            f"  The machine is noisy: half of SGD's own steps lie {(high - low) / middle:.0%} apart. Time it when idle."
        )
    elif quartiles(times["EvenStep"], base)[1] > 1.5:
        words = "UnitStep's is cheaper, and larger batches hide it."
        lines.append(f"  EvenStep's update is long beside so short a pass; {words}")
    return lines
