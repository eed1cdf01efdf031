"""`evenstep doctor`: what UnitStep would do to a model of your own."""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from .. import usage


@dataclass(frozen=True)
class Options:
    """Say how UnitStep would treat each parameter of your model, and what it would cost in memory and time."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE.py:FUNCTION")]
    """The function in your file that builds the model."""
    input: Annotated[str | None, tyro.conf.arg(metavar="SHAPE")] = None
    """Shape of a batch, such as 8x3x32x32, to count and time a step; or define `inputs()` in the file."""
    device: str = "cpu"
    """Where to time it: cpu, cuda, mps, ..."""
    seed: int = 0
    """Seed of the model's weights and of the batch."""


def main(options: Options) -> int:
    """Print the diagnosis; the exit code."""
    from pathlib import Path

    import torch
    from rich.console import Console
    from torch import nn

    import evenstep

    from .. import diagnosis, user_code

    device = usage.usable_device(options.device)
    torch.manual_seed(usage.in_range(options.seed, 0, 2**63 - 1, "--seed"))
    model, module = user_code.load(options.model)
    path = Path(options.model.rpartition(":")[0])
    arguments = user_code.inputs(options.input, module, path)
    user_code.guarded(path, lambda: model.to(device).train())
    optimizer = user_code.guarded(path, lambda: evenstep.UnitStep(model))
    coverage = optimizer.coverage()
    optimizer.detach()
    console = Console()
    console.print(str(coverage), markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n{coverage.summary()}; {_parameters(model)}", highlight=False)
    _memory(console, model, diagnosis.state_floats(model))
    if arguments is None:
        share = diagnosis.largest_share(model, coverage)
        print(f"Arithmetic: sums over layer inputs add at most about {share:.2%} to forward and backward.")
        print("Time: give --input SHAPE, such as 8x3x32x32, or define inputs() in the file, to measure a step.")
        return 0

    args, kwargs = _moved(arguments, device)

    def call(it: nn.Module) -> torch.Tensor:
        return user_code.scalar(it(*args, **kwargs))

    way_out = _way_out(options, args, path)
    cost = user_code.guarded(path, lambda: diagnosis.cost(model, coverage, call), way_out)
    times = user_code.guarded(path, lambda: diagnosis.measure(model, call, device), way_out)
    console.print(
        f"Arithmetic: {cost.flops / 1e9:.3g} GFLOP forward and backward; sums over layer inputs add "
        f"{cost.added / max(1.0, cost.flops):.2%} and read {cost.read / 1e6:.3g} MB again.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"Time: {1e3 * times.evenstep:.2f} ms a step against {1e3 * times.sgd:.2f} ms of SGD with momentum, "
        f"{times.evenstep / times.sgd:.2f} times (median of {times.rounds} of each, in turns).",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _parameters(model: Any) -> str:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{trained:,} parameters train"


def _memory(console: Any, model: Any, floats: dict[str, float]) -> None:
    """The memory of each optimizer's state, a row each."""
    from rich.table import Table

    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    table = Table(title="Memory of the optimizer's state", title_justify="left")
    table.add_column("optimizer")
    table.add_column("floats per parameter", justify="right")
    table.add_column("MB in float32", justify="right")
    for name, each in floats.items():
        table.add_row(name, f"{each:.3f}", f"{4 * each * trained / 1e6:.3g}")
    console.print(table)


def _moved(arguments: tuple[tuple[Any, ...], dict[str, Any]], device: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's arguments on its device."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    args, kwargs = tree_map_only(Tensor, lambda value: value.to(device), arguments)
    return args, kwargs


def _way_out(options: Options, args: tuple[Any, ...], path: Any) -> str:
    """What to do if the model does not take its arguments."""
    if options.input is not None:
        return f"--input {options.input} gives random float32 numbers; for other inputs define inputs() in {path}"
    if args and isinstance(args[0], list):
        return "inputs() returned a list, which is one argument; return a tensor, or a tuple or dict of arguments"
    return ""
