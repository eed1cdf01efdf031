"""`evenstep doctor`: what UnitStep would do to a model of your own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from .. import usage


@dataclass(frozen=True)
class Options:
    """Say how UnitStep would treat each parameter of your model, and what it would cost in memory and time."""

    model: Annotated[str, "Your file with model(), or the function in it that builds the model.", "FILE.py[:FUNCTION]"]
    input: Annotated[str | None, "Shape of a batch, such as 8x3x32x32, to time a step.", "SHAPE"] = None
    device: Annotated[str, "Where to time it: cpu, cuda, mps, ..."] = "cpu"
    seed: Annotated[int, "Seed of the model's weights and of the batch."] = 0


def main(options: Options) -> int:
    """Print the diagnosis; the exit code."""
    import torch
    from torch import Tensor, nn
    from torch.utils._pytree import tree_map_only

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
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{coverage}\n\n{coverage.summary()}; {trained:,} parameters train\n")
    print(f"{'State of the optimizer':<24}floats per parameter    MB in float32")
    for name, floats in diagnosis.state_floats(model).items():
        print(f"  {name:<22}{floats:>20.3f}{4 * floats * trained / 1e6:>17.3g}")
    if arguments is None:
        print("\nTime: give --input SHAPE, such as 8x3x32x32, or define inputs() in the file, to time a step.")
        return 0

    args, kwargs = tree_map_only(Tensor, lambda value: value.to(device), arguments)

    def call(network: nn.Module) -> Tensor:
        return user_code.scalar(network(*args, **kwargs))

    way_out = _way_out(options, args, path)
    times = user_code.guarded(path, lambda: diagnosis.measure(model, call, device), way_out)
    print(
        f"\nTime: {1e3 * times.unitstep:.2f} ms a step against {1e3 * times.sgd:.2f} ms of SGD with momentum, "
        f"{times.unitstep / times.sgd:.2f} times (median of {times.rounds} of each, interleaved)."
    )
    return 0


def _way_out(options: Options, args: tuple[Any, ...], path: Path) -> str:
    """Advice for a model that does not take its arguments."""
    if options.input is not None:
        return f"--input {options.input} gives random float32 numbers; for other inputs define inputs() in {path}"
    if args and isinstance(args[0], list):
        return "inputs() returned a list, which is one argument; return a tensor, or a tuple or dict of arguments"
    return ""
