"""`evenstep doctor`: what EvenStep would do to a model of your own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from .. import usage


@dataclass(frozen=True)
class Options:
    """Say what EvenStep does with the parameters of your model, what to do about the rest, and what it costs."""

    model: Annotated[str, "Your file with model(), or another function of it that builds it.", "FILE.py[:FUNCTION]"]
    input: Annotated[str | None, "Shape of a batch, such as 8x3x32x32, to time a step.", "SHAPE"] = None
    device: Annotated[str, "Where to time it: cpu, cuda, mps, ..."] = "cpu"
    seed: Annotated[int, "Seed of the model's weights and of the batch."] = 0


def main(options: Options) -> int:
    """Print the diagnosis; the exit code."""
    import torch

    from .. import diagnosis, user_code

    device = usage.usable_device(options.device)
    torch.manual_seed(usage.in_range(options.seed, 0, 2**63 - 1, "--seed"))
    model, module, path = user_code.load(options.model)
    found = caller(options, module, path, device)
    call, way_out = found or (None, "")
    user_code.guarded(path, lambda: model.to(device).train())
    rows = user_code.guarded(path, lambda: diagnosis.coverage(model, None))  # what does not depend on a call, first
    if call is not None:
        rows = user_code.guarded(path, lambda: diagnosis.coverage(model, call), way_out)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{rows}\n\nEvenStep on {options.model}: {total:,} parameters, {trained:,} parameters train")
    for how, (count, layers) in diagnosis.shares(model, rows).items():
        print(f"  {count / total:>6.1%} {how:<28} {layers}")
    for sentence in diagnosis.advice(model, rows):
        print(f"\n{sentence.replace('FILE', str(path))}")
    print(f"\n{'State of the optimizer':<24}floats per parameter    MB in float32")
    for name, floats in diagnosis.state_floats(model).items():
        print(f"  {name:<22}{floats:>20.3f}{4 * floats * trained / 1e6:>17.3g}")
    if call is None:
        print("\nTime: define batches(train) or inputs() in the file, or give --input SHAPE, such as 8x3x32x32.")
        return 0
    times = user_code.guarded(path, lambda: diagnosis.measure(model, call, device), way_out)
    print("\n" + "\n".join(diagnosis.timing(times)))
    return 0


def caller(options: Options, module: Any, path: Path, device: Any) -> Any:
    """A call of the model that ends in a loss, and advice if it fails; None if nothing says what the inputs are.

    The inputs are those of `--input`, else the first batch of `batches(train)`, else what `inputs()` returns.
    """
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    from .. import user_code, user_task

    if options.input is None and callable(getattr(module, "batches", None)):
        task = user_task.checked(path, module).to(device)
        batch = next(task.one_pass(True, options.seed))
        return lambda network: task.loss(network, batch), ""
    arguments = user_code.inputs(options.input, module, path)
    if arguments is None:
        return None
    args, kwargs = tree_map_only(Tensor, lambda value: value.to(device), arguments)
    return lambda network: user_code.scalar(network(*args, **kwargs)), _way_out(options, args, path)


def _way_out(options: Options, args: tuple[Any, ...], path: Path) -> str:
    """Advice for a model that does not take its arguments."""
    if options.input is not None:
        return f"--input {options.input} gives random float32 numbers; for other inputs define inputs() in {path}"
    if args and isinstance(args[0], list):
        return "inputs() returned a list, which is one argument; return a tensor, or a tuple or dict of arguments"
    return ""
