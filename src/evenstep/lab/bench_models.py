"""The networks on which steps are timed, in plain torch, as their papers describe them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .models import paper_cnn


def alexnet() -> nn.Module:
    """AlexNet in one column, as torchvision has it, without dropout."""
    modules: list[nn.Module] = []
    sizes = [(3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1)]
    for k, size in enumerate(sizes):
        modules += [nn.Conv2d(*size), nn.ReLU(True)] + ([nn.MaxPool2d(3, 2)] if k in (0, 1, 4) else [])
    dense = [m for size in (256 * 36, 4096) for m in (nn.Linear(size, 4096), nn.ReLU(True))]
    return nn.Sequential(*modules, nn.Flatten(), *dense, nn.Linear(4096, 1000))


def mlp(width: int = 256, depth: int = 4) -> nn.Module:
    """Dense layers of one width with ReLUs, to measure how the cost grows."""
    hidden = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    """A convolution without bias, and batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """ResNet's 1x1, 3x3, 1x1 with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        first, second = conv_bn(inputs, width, 1, 1), conv_bn(width, width, 3, stride)
        self.body = nn.Sequential(first, nn.ReLU(True), second, nn.ReLU(True), conv_bn(width, 4 * width, 1, 1))
        same = stride == 1 and inputs == 4 * width
        self.short = nn.Identity() if same else conv_bn(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Body and shortcut."""
        return functional.relu(self.body(x) + self.short(x))


def resnet50() -> nn.Module:
    """ResNet-50."""
    modules: list[nn.Module] = [conv_bn(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for k in range(depth):
            modules.append(Bottleneck(inputs, width, stride if k == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = width // 64, causal
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
        self.layers = nn.Sequential(*(Layer(width, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.layers(self.token(tokens) + self.position(places))))


class ViT(nn.Module):
    """ViT-B/16 at 224x224: 12 layers of width 768; the mean of the tokens is classified."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.position = nn.Parameter(0.02 * torch.randn(1, 14**2, width))
        self.layers = nn.Sequential(*(Layer(width, causal=False) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.layers(tokens)).mean(1))


class Subject(NamedTuple):
    """A network to be timed and the shape of its usual batch; `norm`: `build` can add batch norm."""

    build: Callable[..., nn.Module]
    shape: tuple[int, ...]
    classes: int
    tokens: bool = False
    norm: bool = False

    def batch(self, batch: int | None, width: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random data; `batch` examples, and for dense nets `width` inputs, instead of the usual."""
        shape = self.shape if batch is None else (batch, *self.shape[1:])
        if self.tokens:
            x = torch.randint(0, self.classes, shape, device=device)
            return x, x.roll(-1, 1)
        if width is not None and len(shape) == 2:
            shape = shape[0], width
        return torch.randn(shape, device=device), torch.randint(0, self.classes, shape[:1], device=device)


def _cnn(norm: bool = False, width: int = 1) -> nn.Module:
    return paper_cnn(batch_norm=norm, width=width)


IMAGES = (256, 3, 224, 224)
SUBJECTS = {
    "paper-cnn": Subject(_cnn, (64, 3, 32, 32), 10, norm=True),
    "paper-cnn-4": Subject(lambda norm=False, width=4: _cnn(norm, width), (256, 3, 32, 32), 10, norm=True),
    "alexnet": Subject(alexnet, IMAGES, 1000),
    "resnet50": Subject(resnet50, IMAGES, 1000),
    "vit-b16": Subject(ViT, (128, 3, 224, 224), 1000),
    "gpt2-small": Subject(GPT, (16, 1024), 50257, tokens=True),
    "mlp": Subject(mlp, (128, 256), 10),
    "gpt-tiny": Subject(lambda: GPT(512, 64, 128, 2), (8, 64), 512, tokens=True),
}
