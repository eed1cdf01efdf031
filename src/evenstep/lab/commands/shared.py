"""What the commands that train share: their common options, and checks before anything runs."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch.nn import functional

from .. import data, loader, usage, user_code, user_task
from ..experiments.common import failures_expected
from ..loader import AUGMENTATIONS
from ..method_names import find
from ..models import MODELS
from ..trial import Trial
from ..user_task import Data

CLASSES = 10  # outputs of the networks unless told otherwise
UNFIT = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, ArithmeticError, AssertionError, MemoryError)


@dataclass(frozen=True)
class Setting:
    """Network, data and length of a training."""

    file: Annotated[Path | None, "Your file with model() and batches(train); see evenstep init.", "FILE.py", "?"] = None
    model: Annotated[str, f"Network to train: {', '.join(MODELS)}."] = "paper_cnn"
    data: Annotated[str, "`fashion`, or a path: CIFAR-10, idx files, an image folder, a text."] = "fashion"
    epochs: Annotated[int, "Passes over the training set."] = 10
    batch_size: Annotated[int, "Examples per step."] = 64
    augment: Annotated[tuple[str, ...], f"Random changes of the images: any of {', '.join(AUGMENTATIONS)}."] = ()
    decay_lr: Annotated[bool, "Let the stepsize fall linearly to zero."] = False
    options: Annotated[tuple[str, ...], "Keywords of the optimizer, as momentum=0.9.", "NAME=VALUE"] = ()
    model_options: Annotated[tuple[str, ...], "Keywords of the network, as width=2.", "NAME=VALUE"] = ()
    device: Annotated[str, "Where to train: cpu, cuda, mps, ..."] = "cpu"


def trial(setting: Setting, method: str, lr: float, seed: int) -> Trial:
    """A trial in this setting; a UsageError if a name is unknown or a number is out of range."""
    return Trial(
        method=find(method).name,
        lr=lr,
        seed=usage.in_range(seed, 0, 2**63 - 1, "--seed"),
        epochs=usage.in_range(setting.epochs, 1, 100_000, "--epochs"),
        batch_size=usage.in_range(setting.batch_size, 1, 10_000_000, "--batch-size"),
        model=usage.known_name(setting.model, MODELS, "network"),
        augment=augmentation(setting.augment),
        decay_lr=setting.decay_lr,
        options=usage.pairs(setting.options, "--options"),
        model_options=usage.pairs(setting.model_options, "--model-options"),
    )


def folder(setting: Any, command: str) -> Path:
    """Where the command writes: `--out`, or a folder named after the user's file or the command."""
    return setting.out or Path("runs") / (command if setting.file is None else setting.file.stem)


def augmentation(names: Iterable[str]) -> Any:
    """A trial's form of these augmentations: False for none, True for crop and flip, else their names joined by "+".

    >>> augmentation([]), augmentation(["flip", "crop"]), augmentation(["cutout", "flip"])
    (False, True, 'flip+cutout')
    """
    chosen = {usage.known_name(name, AUGMENTATIONS, "augmentation") for name in names}
    if chosen in (set(), {"crop", "flip"}):
        return bool(chosen)
    return "+".join(name for name in AUGMENTATIONS if name in chosen)


def load(setting: Setting, *, images: bool = False) -> Data:
    """The setting's data; a UsageError if its network cannot be trained on them, or if they are not `images`."""
    if setting.file is not None:
        for name in ("model", "data", "batch_size", "augment", "model_options"):
            if getattr(setting, name) != getattr(Setting, name):
                flag = f"--{name.replace('_', '-')}"
                raise usage.UsageError(f"{flag} is for the package's networks; {setting.file} has a model and batches")
        return user_task.load(setting.file)
    arrays = data.load(setting.data)
    text = isinstance(arrays, data.Text)
    if text and images:
        raise usage.UsageError(f"--data {setting.data} is a text; images are needed here")
    if text != (setting.model == "transformer"):
        kind, way_out = ("a text", "--model transformer") if text else ("images", "--model paper_cnn")
        raise usage.UsageError(f"--model {setting.model} cannot be trained on {setting.data}, {kind}; try {way_out}")
    return arrays


def fitted(wanted: Trial, arrays: Data) -> Trial:
    """The trial with as many outputs as the data have classes; or of a user's network and batches."""
    if isinstance(arrays, user_task.UserTask):
        return replace(wanted, model=arrays.name, batch_size=0)
    if isinstance(arrays, data.Text) or len(arrays.classes) == CLASSES or "classes" in wanted.model_options:
        return wanted
    return replace(wanted, model_options={**wanted.model_options, "classes": len(arrays.classes)})


def try_out(example: Trial, arrays: Data, device: torch.device | str = "cpu") -> None:
    """Build the trial's network and optimizer and take one step on two examples; a UsageError if an option is wrong."""
    if isinstance(arrays, user_task.UserTask):
        return try_task(example, arrays, device)
    method, order = find(example.method), torch.Generator().manual_seed(0)
    network = f"--model {example.model} with {example.model_options}", example.model_options
    rule = f"method {method.label} with {example.options}", example.options
    with torch.random.fork_rng(devices=[]), failures_expected(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        with _blamed(*network):
            model = MODELS[example.model](arrays.channels, batch_norm=method.batch_norm, **example.model_options)
            model = model.to(device).train()
        with _blamed(*rule):
            optimizer = method.optimizer(model, lr=example.lr, **example.options)
        x, y = next(loader.epoch_batches(arrays, 2, order, device))
        with _blamed(*network):
            output = model(x).flatten(0, -2)
            if isinstance(arrays, data.Arrays) and output.shape[-1] < len(arrays.classes):
                raise usage.UsageError(
                    f"{network[0]}: it has {output.shape[-1]} outputs, "
                    f"and {arrays.name} has {len(arrays.classes)} classes"
                )
            functional.cross_entropy(output, y.flatten()).backward()
        with _blamed(*rule):
            optimizer.step()


def try_task(example: Trial, task: user_task.UserTask, device: torch.device | str = "cpu") -> None:
    """Train one step on the first batch of a user's file, and look at one that is held out; the first fault is told."""
    method, task = find(example.method), task.to(device)
    if method.batch_norm:
        raise usage.UsageError(f"method {method.name} changes the network; put batch norm into model() of {task.path}")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(example.seed)
        model = task.model().to(device).train()
        with _blamed(f"method {method.label} with {example.options}", {"": None}):
            optimizer = method.optimizer(model, lr=example.lr, **example.options)
        loss = task.loss(model, next(task.one_pass(True, 0)))
        if not torch.isfinite(loss):
            raise usage.UsageError(f"{task.path}: the loss of the first batch is {loss.item()}, before any training")
        user_code.guarded(task.path, loss.backward)
        if all(p.grad is None for p in model.parameters()):
            raise usage.UsageError(f"{task.path}: the loss does not depend on the parameters of the model it was given")
        with _blamed(f"method {method.label} with {example.options}", {"": None}):
            optimizer.step()
        with torch.no_grad():
            task.measured(model.eval(), next(task.one_pass(False, 0)))


@contextmanager
def _blamed(what: str, options: dict[str, Any]) -> Iterator[None]:
    """Turn a failure into a UsageError about `what`; without options most kinds are our own bugs, and stay."""
    try:
        yield
    except UNFIT as error:
        if not options and not isinstance(error, TypeError | ValueError | MemoryError):
            raise
        raise usage.UsageError(f"{what}: {usage.first_line(error)}") from error
