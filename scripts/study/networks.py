"""Networks of the study, each with a width, so that a test can train small ones."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A pre-norm transformer block with heads of 64, or three heads where the width is no multiple of 64."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.head_size, self.causal = 64 if width % 64 == 0 else width // 3, causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, self.head_size)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def draw_weights(model: nn.Module, depth: int) -> None:
    """N(0, 0.02²), a block's output projections divided by √(2 · depth), biases 0."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            last = name.rpartition(".")[0].rpartition(".")[2] in ("out", "down")
            nn.init.normal_(p, std=0.02 / (math.sqrt(2 * depth) if last else 1))
        elif name.endswith("bias"):
            nn.init.zeros_(p)


class GPT(nn.Module):
    """A language model of bytes with learned positions and an untied head."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        draw_weights(self, depth)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class ViT(nn.Module):
    """A vision transformer on patches of 4 x 4, with the mean of all positions in front of the head."""

    def __init__(self, width: int = 192, depth: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(64, width))
        self.blocks = nn.Sequential(*(Block(width, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        patches = self.patches.weight.detach().clone()
        draw_weights(self, depth)
        with torch.no_grad():
            self.patches.weight.copy_(patches)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


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
        with torch.no_grad():
            convs[1].weight /= 2

    def forward(self, x: Tensor) -> Tensor:
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
