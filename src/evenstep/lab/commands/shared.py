"""What the commands that train have in common."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import tyro
from torch.nn import functional

from .. import data, feed, usage
from ..data.feeding import AUGMENTATIONS
from ..experiments.common import failures_expected
from ..methods import METHODS
from ..models import MODELS
from ..trial import Trial

CLASSES = 10  # what the networks have unless told otherwise
NONE = "(default: none)"  # what the help says of options that take several values and may stay empty
UNFIT = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, ArithmeticError, AssertionError, MemoryError)


@dataclass(frozen=True)
class Setting:
    """Network, data and length of a training."""

    model: Annotated[str, tyro.conf.arg(help=f"Network to train: {', '.join(MODELS)}.")] = "paper_cnn"
    data: str = "fashion"
    """`fashion` for the images inside the package, or a path: CIFAR-10, idx files, an image folder, a text."""
    epochs: int = 10
    """Passes over the training set."""
    batch_size: int = 64
    """Examples per step."""
    augment: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="WHAT",
            help=f"Change the images at random: any of {', '.join(AUGMENTATIONS)}.",
            help_behavior_hint=NONE,
        ),
    ] = ()
    decay_lr: bool = False
    """Let the stepsize fall to zero in a straight line."""
    options: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE", help_behavior_hint=NONE)] = ()
    """Keywords for the optimizer, such as momentum=0.9."""
    model_options: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE", help_behavior_hint=NONE)] = ()
    """Keywords for the network, such as width=2."""
    device: str = "cpu"
    """Where to train: cpu, cuda, mps, ..."""


def trial(setting: Setting, method: str, lr: float, seed: int) -> Trial:
    """A trial in this setting, if all it names is known and in range."""
    return Trial(
        method=usage.known_name(method, METHODS, "method"),
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


def augmentation(names: Iterable[str]) -> Any:
    """What a trial calls these augmentations: False for none, True for crop and flip, else their names joined by "+".

    >>> augmentation([]), augmentation(["flip", "crop"]), augmentation(["cutout", "flip"])
    (False, True, 'flip+cutout')
    """
    chosen = {usage.known_name(name, AUGMENTATIONS, "augmentation") for name in names}
    if chosen in (set(), {"crop", "flip"}):
        return bool(chosen)
    return "+".join(name for name in AUGMENTATIONS if name in chosen)


def load(setting: Setting, *, images: bool = False) -> data.Arrays | data.Text:
    """The setting's data, if its network can be trained on them; with `images` there is no network for a text."""
    arrays = data.load(setting.data)
    text = isinstance(arrays, data.Text)
    if text and images:
        raise usage.UsageError(f"--data {setting.data} is a text; images are needed here")
    if text != (setting.model == "transformer"):
        kind, way_out = ("a text", "--model transformer") if text else ("images", "--model paper_cnn")
        raise usage.UsageError(f"--model {setting.model} cannot be trained on {setting.data}, {kind}; try {way_out}")
    return arrays


def fitted(wanted: Trial, arrays: data.Arrays | data.Text) -> Trial:
    """The trial with a network that has an output for each class, where there are not ten of them."""
    if isinstance(arrays, data.Text) or len(arrays.classes) == CLASSES or "classes" in wanted.model_options:
        return wanted
    return replace(wanted, model_options={**wanted.model_options, "classes": len(arrays.classes)})


def try_out(example: Trial, arrays: data.Arrays | data.Text, device: torch.device | str = "cpu") -> None:
    """Build the trial's network and optimizer once, and take one step on two examples.

    An option that neither takes, or cannot run with, is so told before anything runs.
    """
    method, order = METHODS[example.method], torch.Generator().manual_seed(0)
    network = f"--model {example.model} with {example.model_options}"
    rule = f"method {example.method} with {example.options}"
    with torch.random.fork_rng(devices=[]), failures_expected(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        with _told(network, example.model_options):
            model = MODELS[example.model](arrays.channels, batch_norm=method.batch_norm, **example.model_options)
            model = model.to(device).train()
        with _told(rule, example.options):
            optimizer = method.optimizer(model, lr=example.lr, **example.options)
        x, y = next(feed.epoch(arrays, 2, order, device, False))
        with _told(network, example.model_options):
            output = model(x).flatten(0, -2)
        if isinstance(arrays, data.Arrays) and output.shape[-1] < len(arrays.classes):
            raise usage.UsageError(
                f"{network}: it has {output.shape[-1]} outputs, and {arrays.name} has {len(arrays.classes)} classes"
            )
        with _told(network, example.model_options):
            functional.cross_entropy(output, y.flatten()).backward()
        with _told(rule, example.options):
            optimizer.step()


@contextmanager
def _told(what: str, options: dict[str, Any]) -> Iterator[None]:
    """Make of a failure one line for the user; without options most kinds are faults of ours, and stay as they are."""
    try:
        yield
    except UNFIT as error:
        if not options and not isinstance(error, TypeError | ValueError | MemoryError):
            raise
        raise usage.UsageError(f"{what}: {usage.first_line(error)}") from error
