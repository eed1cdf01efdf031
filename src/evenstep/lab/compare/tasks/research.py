"""The tasks that EvenStep's rule was designed on. For single jobs: none has a validation split."""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from evenstep.lab.models import paper_cnn

from .gpt import GPT
from .images import ImageTask
from .task import Build, Task
from .text import TextTask
from .vit import ViT


class Residual(nn.Module):
    """Two convolutions of 3 x 3 with or without batch norm; a 1 x 1 convolution on the skip where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: bool) -> None:
        super().__init__()
        convs = [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)]
        first, second = ([conv, nn.BatchNorm2d(outputs)] if norm else [conv] for conv in convs)
        self.body = nn.Sequential(*first, nn.ReLU(), *second)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()
        for conv in convs:
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        convs[1].weight.data /= 2

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        return F.relu(self.skip(x) + self.body(x))


def resnet(norm: bool, width: int = 64) -> nn.Sequential:
    """Five residual blocks of 1, 2, 2, 4 and 4 times `width` channels."""
    w = width
    sizes = [(w, w, 1), (w, 2 * w, 2), (2 * w, 2 * w, 1), (2 * w, 4 * w, 2), (4 * w, 4 * w, 1)]
    first = [nn.Conv2d(3, w, 3, padding=1), nn.ReLU()]
    blocks = [Residual(*size, norm) for size in sizes]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, 10))


def deep(width: int = 64) -> nn.Sequential:
    """Nine layers without norms, six of them convolutions of 1 to 4 times `width` channels; He's weights."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    units = 8 * width
    layers += [nn.Flatten(), nn.Linear(64 * width, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU()]
    layers.append(nn.Linear(units, 10))
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*layers)


def gpt(width: int, depth: int, steps: int = 800) -> TextTask:
    """A byte GPT with a tenth of its steps as warm-up."""
    build, small = partial(GPT, width, depth, 256), partial(GPT, 24, 1, 16)
    return TextTask(build, steps, 64, small, warm_up=steps // 10, mixed=True, windows=512, validated=False)


def crops(build: Build, small: Build) -> ImageTask:
    """Five epochs of CIFAR-10 in batches of 128."""
    return ImageTask(build, 5 * 390, 128, small, validated=False)


def paper(batch_norm: bool = False, constant: bool = True) -> ImageTask:
    """The paper's CNN as in its figure 2: 40 epochs in batches of 64, a constant stepsize, no augmentation."""
    build = partial(paper_cnn, batch_norm=batch_norm)
    return ImageTask(build, 40 * 781, 64, build, constant=constant, augment=False, validated=False)


RESEARCH: dict[str, Task] = {
    "gpt": gpt(384, 6),
    "gpt-1024": gpt(1024, 8, steps=1500),
    "resnet-bn": crops(partial(resnet, True), partial(resnet, True, width=4)),
    "resnet": crops(partial(resnet, False), partial(resnet, False, width=4)),
    "deep": crops(deep, partial(deep, width=4)),
    "vit-20": ImageTask(ViT, 20 * 390, 128, partial(ViT, 24, 1), warm_up=390, mixed=True, validated=False),
    "paper-cnn": paper(),
    "paper-cnn-decay": paper(constant=False),
    "paper-cnn-bn": paper(batch_norm=True),
    "gpt-128": gpt(128, 6),
    "gpt-192": gpt(192, 6),
}
