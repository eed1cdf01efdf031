"""The deep autoencoder of Hinton & Salakhutdinov (2006), on grey images."""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from .images import ImageTask
from .task import LOSS, Splits, carved

if TYPE_CHECKING:
    from evenstep.lab.data import Arrays

SIZES = (1024, 1000, 500, 250, 30)


@dataclass(frozen=True)
class AutoencoderTask(ImageTask):
    """Grey images are to be reproduced from their code; held out: the mean squared error of standardized pixels."""

    metric = LOSS

    def splits(self, arrays: "Arrays") -> Splits:
        """The same tensor as input and target."""
        train, test = (arrays.normalize(x).mean(1).flatten(1) for x in (arrays.train_x, arrays.test_x))
        rest, held = carved(train, train)
        return {"train": rest, "validation": held, "test": (test, test)}

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The mean squared error of a pixel."""
        return F.mse_loss(output, y)


def autoencoder(sizes: tuple[int, ...] = SIZES) -> nn.Sequential:
    """Dense layers down to the code and back, tanh between them but at the code; PyTorch's first weights."""
    down = [(a, b) for a, b in itertools.pairwise(sizes)]
    up = [(b, a) for a, b in reversed(down)]
    layers: list[nn.Module] = []
    for inputs, outputs in [*down, *up]:
        layers += [nn.Linear(inputs, outputs)] + ([nn.Tanh()] if outputs not in (sizes[0], sizes[-1]) else [])
    return nn.Sequential(*layers)


TASKS = {
    "autoencoder": AutoencoderTask(
        autoencoder,
        steps=1500,
        batch=128,
        small=partial(autoencoder, (1024, 8, 4)),
        augment=False,
    )
}
