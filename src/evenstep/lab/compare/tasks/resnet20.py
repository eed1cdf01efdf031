"""ResNet-20 for CIFAR-10 (He et al. 2016, §4.2), with batch norm and without."""

import itertools
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .images import ImageTask

BLOCKS = 9


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters: every other pixel, zeros for new channels.

    Without batch norm the second convolution begins divided by √9, so that nine blocks keep the size of their input.
    """

    def __init__(self, inputs: int, outputs: int, norm: bool) -> None:
        super().__init__()
        self.stride, self.more = outputs // inputs, outputs - inputs
        convs = [
            nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=not norm),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=not norm),
        ]
        first, second = ([conv, nn.BatchNorm2d(outputs)] if norm else [conv] for conv in convs)
        self.body = nn.Sequential(*first, nn.ReLU(), *second)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(short + self.body(x))


def resnet20(norm: bool, width: int = 16) -> nn.Sequential:
    """Nine blocks of 1, 2 and 4 times `width` channels; He's weights."""
    sizes = [width] * 4 + [2 * width] * 3 + [4 * width] * 3
    blocks = [Block(inputs, outputs, norm) for inputs, outputs in itertools.pairwise(sizes)]
    first = [nn.Conv2d(3, width, 3, padding=1, bias=not norm), *([nn.BatchNorm2d(width)] if norm else []), nn.ReLU()]
    model = nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    with torch.no_grad():
        for block in () if norm else blocks:
            block.body[-1].weight /= BLOCKS**0.5
    return model


def task(norm: bool) -> ImageTask:
    """Five epochs of CIFAR-10 with crops and flips."""
    build, small = partial(resnet20, norm), partial(resnet20, norm, width=4)
    return ImageTask(build, 5 * 351, 128, small, seen="a net like it")


TASKS = {"resnet20": task(norm=False), "resnet20-bn": task(norm=True)}
