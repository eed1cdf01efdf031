"""A task in a user's file: `model()`, `batches(train)`, and if wanted `loss(model, batch)`, `metrics(model, batch)`.

To the training loop a task is data, as the images of the package are. Its identity is the text of its file.
"""

import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from . import user_code
from .data import Arrays, Text
from .usage import UsageError

MOST_BATCHES = 20_000  # of an epoch that does not know its length and is counted
HINT = "evenstep init writes a file to start from"
NEEDED = ("model", "batches")
SIGNATURES = {"model": (), "batches": ("train",), "loss": ("model", "batch"), "metrics": ("model", "batch")}


@dataclass(frozen=True, eq=False)
class UserTask:
    """A user's file that has been read; an error in it is a UsageError with its place.

    With `steps` an epoch is so many batches, which go on where the last epoch ended; else it is one pass.
    """

    path: Path
    module: ModuleType
    digest: str
    device: torch.device | str = "cpu"
    steps: int | None = None
    cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The file's name, by which records know the task."""
        return self.path.name

    def to(self, device: torch.device | str) -> "UserTask":
        """The same task with its batches on `device`."""
        return replace(self, device=torch.device(device))

    def model(self) -> nn.Module:
        """A new network."""
        return user_code.model_of(self.path, self.module.model, f"{self.path}: model()")

    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch; what does not know its length is counted once."""
        if self.steps is None and "steps" not in self.cache:
            self.cache["steps"] = self._count()
        return self.steps or self.cache["steps"]

    def _count(self) -> int:
        try:
            return len(self._loader(True))  # type: ignore[arg-type]
        except TypeError:  # a generator, or a DataLoader of a data set without length
            number = sum(1 for _ in zip(range(MOST_BATCHES + 1), self.one_pass(True, 0), strict=False))
        if number > MOST_BATCHES:
            raise UsageError(
                f"{self.path}: batches(True) did not end after {MOST_BATCHES:,} batches; let it end, or give it a len()"
            )
        return number

    def stream(self, order: torch.Generator) -> Iterator[Any]:
        """Training batches without an end, pass after pass."""
        while True:
            yield from self.epoch(order)

    def epoch(self, order: torch.Generator) -> Iterator[Any]:
        """The training batches of one pass; `order` seeds it, so that every method sees the same batches."""
        return self.one_pass(True, int(torch.randint(2**31, (), generator=order)))

    def one_pass(self, train: bool, seed: int) -> Iterator[Any]:
        """The batches of one pass on the device, drawn with random numbers of their own."""
        own, name = RandomNumbers(seed), f"batches({train})"
        with own.active():
            batches = user_code.guarded(self.path, lambda: iter(self._loader(train)))
        for number in count():
            with own.active():
                batch = user_code.guarded(self.path, partial(next, batches, self))
            if batch is self:
                break
            for k, tensor in enumerate(_numbers(batch)):
                if tensor.device.type == "cpu" and not torch.isfinite(tensor).all():
                    raise UsageError(
                        f"{self.path}: batch {number} of {name} has NaN or infinite numbers (tensor {k}, shape "
                        f"{list(tensor.shape)}); leave such examples out, or replace the numbers"
                    )
            yield moved(batch, self.device)
        if number == 0:
            raise UsageError(f"{self.path}: {name} gave no batch; is the data set empty, or smaller than a batch?")

    def _loader(self, train: bool) -> Iterable[Any]:
        """What `batches(train)` returned: kept, unless it is an iterator, which can be read only once."""
        if train in self.cache:
            return self.cache[train]
        found = user_code.guarded(self.path, lambda: self.module.batches(train))
        if not isinstance(found, Iterable) or isinstance(found, Tensor | Mapping | str):
            raise UsageError(
                f"{self.path}: batches({train}) returned {type(found).__name__}; it should return a DataLoader, a list "
                f"of batches, or yield them"
            )
        if not isinstance(found, Iterator):
            self.cache[train] = found
        return found

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch: the file's own, or that of `standard`."""
        own = getattr(self.module, "loss", None)
        if own is None:
            return self._standard(model, batch)[0]
        return self._checked(user_code.guarded(self.path, lambda: own(model, batch)))

    def _standard(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = user_code.guarded(
            self.path, lambda: standard(model, batch), f"define loss(model, batch) in {self.name}"
        )
        return self._checked(loss), metrics

    def _checked(self, loss: Any) -> Tensor:
        """The loss, if it is one number that can be trained on."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"{self.path}: loss() returned {what}; it should return a tensor of one number")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UsageError(
                f"{self.path}: the loss has no gradient; was it computed under no_grad, or with .item() or .detach()?"
            )
        return loss.reshape(())

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> dict[str, Any]:
        """The mean loss and metrics of the held-out batches, in eval mode."""
        was_training, sums, examples = model.training, dict[str, Any](), 0
        model.eval()
        try:
            for batch in self.one_pass(False, 0):
                found, weight = self.measured(model, batch), size(batch)
                examples += weight
                for name, value in found.items():
                    sums[name] = sums.get(name, 0.0) + weight * value
        finally:
            model.train(was_training)
        means = {name: float(total) / examples for name, total in sums.items()}
        row = {"test_loss": means.pop("loss"), "test_accuracy": means.pop("accuracy", None), "dead_share": None}
        return row | ({"metrics": means} if means else {})

    def measured(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Loss and metrics of one batch."""
        own = getattr(self.module, "metrics", None)
        if hasattr(self.module, "loss"):
            found: dict[str, Any] = {"loss": self.loss(model, batch)}
        else:
            loss, usual = self._standard(model, batch)
            found = {"loss": loss, **usual}
        if own is not None:
            more = user_code.guarded(self.path, lambda: own(model, batch))
            if not isinstance(more, Mapping) or not all(_is_number(value) for value in more.values()):
                raise UsageError(f"{self.path}: metrics() should return a dict of numbers, such as {{'accuracy': 0.9}}")
            found |= {str(name): value for name, value in more.items() if name != "loss"}
        return found


Data = Arrays | Text | UserTask


def load(path: Path) -> UserTask:
    """The task of a file, which is read with seed 0, so that random data in it are the same every time."""
    if path.suffix != ".py":
        raise UsageError(f"{path} is not a Python file; give a file such as my.py ({HINT})")
    with RandomNumbers(0).active():
        module = user_code.imported(path)
    return checked(path, module)


def checked(path: Path, module: ModuleType) -> UserTask:
    """The task of a file that has been read, if it has the functions and they take the arguments they should."""
    for name in NEEDED:
        if not callable(getattr(module, name, None)):
            raise UsageError(f"{path} has no function {name!r}{user_code.others(module, name)}; {HINT}")
    for name, arguments in SIGNATURES.items():
        if callable(found := getattr(module, name, None)) and not _accepts(found, arguments):
            raise UsageError(f"{path}: {name}{inspect.signature(found)} should be {name}({', '.join(arguments)})")
    return UserTask(path, module, hashlib.sha256(path.read_bytes()).hexdigest()[:12])


def standard(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The usual loss of a batch: the model's own, cross-entropy of class numbers, or the squared error of numbers."""
    if isinstance(batch, Mapping):
        output = model(**batch)
        if not isinstance(getattr(output, "loss", None), Tensor):
            raise ValueError("batches are dicts, and the model's output has no loss")
        return output.loss, {}
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise ValueError("batches are not pairs (inputs, targets)")
    output, targets = model(batch[0]), batch[1]
    if not isinstance(output, Tensor):
        raise ValueError(f"the model's output is {type(output).__name__}, not a tensor")
    if targets.is_floating_point():
        if output.dim() == targets.dim() + 1 and output.shape[-1] == 1:
            output = output[..., 0]
        if output.shape != targets.shape:
            raise ValueError(f"outputs {list(output.shape)} and targets {list(targets.shape)} differ in shape")
        return functional.mse_loss(output, targets), {}
    if output.shape[:-1] == targets.shape:  # classes last: [batch, classes] or [batch, time, classes]
        output, targets = output.flatten(0, -2), targets.flatten()
    loss = functional.cross_entropy(output, targets.long())
    return loss, {"accuracy": (output.argmax(1) == targets).float().mean()}


def moved(batch: Any, device: torch.device | str) -> Any:
    """A batch with its tensors on the device."""
    if hasattr(batch, "to"):  # a tensor, or what graph and text packages make
        return batch.to(device)
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def size(batch: Any) -> int:
    """The number of examples in a batch: the length of its first tensor; 1 if there is none."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(leaves[0]) if leaves else 1


def _numbers(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _accepts(function: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    """Whether the function can be called with as many arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


class RandomNumbers:
    """Random numbers of torch (CPU), numpy and Python that begin at a seed, apart from everyone else's."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.state: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from these numbers inside the block."""
        numpy, before = sys.modules.get("numpy"), _random_state()
        if self.state is None:
            torch.default_generator.manual_seed(self.seed)
            random.seed(self.seed)
            if numpy is not None:
                numpy.random.seed(self.seed % 2**32)
        else:
            _set_random_state(self.state)
        try:
            yield
        finally:
            self.state = _random_state()
            _set_random_state(before)


def _random_state() -> Any:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_state(state: Any) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])
