"""Tasks on text: the bytes of Python source."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenstep.lab.usage import UsageError

from .task import LOSS, Batches, Part, Splits, Task

TEXT = "python-source.txt"
FIFTIETHS = {"train": (0, 48), "validation": (48, 49), "test": (49, 50)}


@dataclass(frozen=True)
class TextTask(Task):
    """The next byte of Python source; held out: the mean loss of windows end to end.

    The last fiftieth is the test split, the one before it validates.
    """

    context: int = 256
    windows: int = 256
    metric = LOSS

    def tiny(self) -> Task:
        """Windows of 16 bytes."""
        return replace(super().tiny(), context=16, windows=4)  # type: ignore[call-arg]

    @property
    def source(self) -> tuple[Any, ...]:
        """How the text is split."""
        return (TextTask, self.validated)

    def load(self, folder: Path | None, device: torch.device) -> Splits:
        """The bytes of each split."""
        path = folder / TEXT if folder else Path(__file__)
        if not path.is_file():
            raise UsageError(f"--data {folder}: {TEXT} is not there")
        content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).to(device)
        if folder is None:
            content = content.repeat(4)  # so that a fiftieth has a few windows
        cuts = {name: [len(content) * k // 50 for k in ends] for name, ends in FIFTIETHS.items()}
        if not self.validated:
            cuts = {"train": [0, cuts["test"][0]], "test": cuts["test"]}
        return {name: (content[first:last],) for name, (first, last) in cuts.items()}

    def cut(self, source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Windows that begin at these places, and the bytes that follow each of theirs."""
        tokens = source[starts[:, None] + torch.arange(self.context + 1, device=source.device)].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def batches(self, part: Part, generator: torch.Generator) -> Batches:
        """Windows at random places."""
        (source,) = part
        last = len(source) - self.context - 1
        while True:
            yield self.cut(source, torch.randint(last, (self.batch,), generator=generator, device=source.device))

    def pieces(self, part: Part) -> Batches:
        """Windows end to end from the first byte."""
        (source,) = part
        starts = torch.arange(self.windows, device=source.device) * self.context
        yield from (self.cut(source, some) for some in starts.split(64))
