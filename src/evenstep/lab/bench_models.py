"""The networks that step times are measured on, plain torch, built as their papers have them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .models import paper_cnn


def alexnet(classes: int = 1000) -> nn.Module:
    """AlexNet in one column, as torchvision has it, without dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2),
        nn.ReLU(True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(True),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(256 * 36, 4096),
        nn.ReLU(True),
        nn.Linear(4096, 4096),
        nn.ReLU(True),
        nn.Linear(4096, classes),
    )


def mlp(width: int = 256, depth: int = 4, classes: int = 10) -> nn.Module:
    """Dense layers of one width with ReLUs, to show how cost grows."""
    hidden = [m for _ in range(depth - 1) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), *hidden, nn.Linear(width, classes))


class Bottleneck(nn.Module):
    """ResNet's 1x1, 3x3, 1x1 with a shortcut; without batch norm the convolutions have biases."""

    def __init__(self, inputs: int, width: int, stride: int, norm: bool) -> None:
        super().__init__()
        sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.body = nn.Sequential()
        for k, (a, b, kernel, step) in enumerate(sizes):
            self.body.append(nn.Conv2d(a, b, kernel, step, kernel // 2, bias=not norm))
            self.body.append(nn.BatchNorm2d(b) if norm else nn.Identity())
            if k < 2:
                self.body.append(nn.ReLU(True))
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            norms = [nn.BatchNorm2d(4 * width)] if norm else []
            self.short = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=not norm), *norms)

    def forward(self, x: Tensor) -> Tensor:
        """Body and shortcut."""
        return functional.relu(self.body(x) + self.short(x))


def resnet50(norm: bool = True, classes: int = 1000) -> nn.Module:
    """ResNet-50, with batch norm or without any."""
    stem: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=not norm)]
    stem += [nn.BatchNorm2d(64)] if norm else []
    modules, inputs = [*stem, nn.ReLU(True), nn.MaxPool2d(3, 2, 1)], 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for k in range(depth):
            modules.append(Bottleneck(inputs, width, stride if k == 0 else 1, norm))
            inputs = 4 * width
    return nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then two dense layers, both added to the stream."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 small: 12 layers of width 768, context 1024, its head tied to the embedding."""

    def __init__(self, vocabulary: int = 50257, context: int = 1024, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, width // 64, True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.layers(self.token(tokens) + self.position(places))))


class ViT(nn.Module):
    """ViT-B/16 at 224x224, the mean of the tokens classified."""

    def __init__(
        self, width: int = 768, depth: int = 12, classes: int = 1000, size: int = 224, patch: int = 16
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.layers = nn.Sequential(*(Layer(width, width // 64, False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.layers(tokens)).mean(1))


class Subject(NamedTuple):
    """A network to be timed: how it is built, with batch norm or without, and what it is fed."""

    build: Callable[..., nn.Module]
    shape: tuple[int, ...]
    classes: int
    tokens: bool = False
    norm: bool = False  # whether it can be built with batch norm

    def batch(self, batch: int | None, width: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random data of this kind; `batch` examples, and for dense nets `width` inputs, instead of the usual."""
        shape = self.shape if batch is None else (batch, *self.shape[1:])
        if width is not None and len(shape) == 2 and not self.tokens:
            shape = shape[0], width
        if self.tokens:
            x = torch.randint(0, self.classes, shape, device=device)
            return x, x.roll(-1, 1)
        return torch.randn(shape, device=device), torch.randint(0, self.classes, shape[:1], device=device)


SUBJECTS = {
    "paper-cnn": Subject(
        lambda norm=False, width=1: paper_cnn(batch_norm=norm, width=width), (64, 3, 32, 32), 10, norm=True
    ),
    "paper-cnn-4": Subject(
        lambda norm=False, width=4: paper_cnn(batch_norm=norm, width=width), (256, 3, 32, 32), 10, norm=True
    ),
    "alexnet": Subject(alexnet, (256, 3, 224, 224), 1000),
    "resnet50": Subject(resnet50, (256, 3, 224, 224), 1000),
    "resnet50-plain": Subject(lambda norm=False: resnet50(norm), (256, 3, 224, 224), 1000, norm=True),
    "vit-b16": Subject(ViT, (128, 3, 224, 224), 1000),
    "gpt2-small": Subject(GPT, (16, 1024), 50257, True),
    "mlp": Subject(mlp, (128, 256), 10),
    "gpt-tiny": Subject(lambda: GPT(512, 64, 128, 2), (8, 64), 512, True),
}
