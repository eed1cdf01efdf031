"""An MLP on a table with unnormalized columns: hand-made statistics of images, each in its own unit."""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .images import ImageTask
from .task import Splits, carved

if TYPE_CHECKING:
    from evenstep.lab.data import Arrays

COLUMNS = 89


@dataclass(frozen=True)
class TableTask(ImageTask):
    """The class of an image from statistics of its pixels, which are not scaled: from 0.1 to 10,000."""

    def splits(self, arrays: "Arrays") -> Splits:
        """Columns and labels."""
        train, test = (torch.cat([columns(x) for x in part.split(2000)]) for part in (arrays.train_x, arrays.test_x))
        rest, held = carved(train, arrays.train_y)
        return {"train": rest, "validation": held, "test": (test, arrays.test_y)}


def columns(images: Tensor) -> Tensor:
    """Statistics of images [N, 3, 32, 32] in bytes, as an engineer of features would take them.

    Per channel the mean, variance, skewness, least and greatest value, and the mean square of differences; correlations
    of channels; of the grey image 16 blocks, a histogram, its entropy, and gradients by direction and quadrant.
    """
    x = images.float()
    flat = x.flatten(2)
    centred = flat - flat.mean(2, keepdim=True)
    variance = centred.square().mean(2)
    skewness = centred.pow(3).mean(2) / (variance + 1).pow(1.5)
    energies = [x.diff(dim=axis).square().mean((2, 3)) for axis in (2, 3)]
    pairs = [(centred[:, a] * centred[:, b]).mean(1) for a, b in ((0, 1), (0, 2), (1, 2))]
    sizes = [(variance[:, a] * variance[:, b]).sqrt() + 1 for a, b in ((0, 1), (0, 2), (1, 2))]
    correlations = torch.stack([pair / size for pair, size in zip(pairs, sizes, strict=True)], 1)
    grey = x.mean(1)
    blocks = grey.unflatten(2, (4, 8)).unflatten(1, (4, 8)).mean((2, 4)).flatten(1)
    bins = nn.functional.one_hot((grey.flatten(1) / 16).long(), 16).sum(1).float()
    share = bins / bins.sum(1, keepdim=True)
    entropy = -(share * share.clamp(min=1e-9).log2()).sum(1, keepdim=True)
    moments = [flat.mean(2), variance, skewness, flat.amin(2), flat.amax(2)]
    return torch.cat([*moments, *energies, correlations, blocks, bins, entropy, directions(grey)], 1)


def directions(grey: Tensor) -> Tensor:
    """The gradients of each quadrant, added up by their direction in 8 bins."""
    across, down = grey.diff(dim=2)[:, :-1], grey.diff(dim=1)[:, :, :-1]
    size = (across.square() + down.square()).sqrt()
    kind = ((torch.atan2(down, across) / torch.pi + 1) * 4).long().clamp(max=7)
    each = nn.functional.one_hot(kind, 8) * size[..., None]
    rows = [part.split([16, 15], 2) for part in each.split([16, 15], 1)]
    return torch.cat([part.sum((1, 2)) for row in rows for part in row], 1)


def mlp(width: int = 256, depth: int = 3) -> nn.Sequential:
    """Dense layers with ReLUs; PyTorch's first weights."""
    sizes = [COLUMNS, *[width] * depth]
    hidden = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


TASKS = {
    "tabular": TableTask(
        mlp,
        steps=2000,
        batch=256,
        small=partial(mlp, 8, 2),
        augment=False,
    )
}
