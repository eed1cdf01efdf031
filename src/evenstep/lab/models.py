"""The networks of the experiments: for 32x32 images (every ReLU is a module of its own), and for text."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def paper_cnn(
    channels: int = 3, batch_norm: bool = False, width: int = 1, classes: int = 10, l2: float = 0.0
) -> nn.Sequential:
    """The CNN of the paper's figure 2, C6(5x5)-P-C16(5x5)-P-F120-F84-F10, `width` times as wide.

    Batch norm, if wanted, follows every layer but the last and precedes the ReLU. `l2` is as in `L2Term`.
    """
    c1, c2, f1, f2 = 6 * width, 16 * width, 120 * width, 84 * width
    model = _network(channels, batch_norm, [(c1, 5, 0), None, (c2, 5, 0), None], 5, (f1, f2), classes)
    return model.append(L2Term(model, l2)) if l2 else model


def deep_net(channels: int = 3, batch_norm: bool = False, he: bool = False, classes: int = 10) -> nn.Sequential:
    """Nine layers: 3x3 convolutions 64-64-P-128-128-P-256-256-P, then F512-F512-F10.

    `he` draws the weights by He's rule and sets the biases to zero; otherwise PyTorch's default stands.
    """
    layers = [layer for units in (64, 128, 256) for layer in ((units, 3, 1), (units, 3, 1), None)]
    model = _network(channels, batch_norm, layers, 4, (512, 512), classes)
    if he:
        _he_init(model)
    return model


def alexnet(channels: int = 3, batch_norm: bool = False, width: int = 48, classes: int = 10) -> nn.Sequential:
    """Eight layers in AlexNet's proportions, for 32x32 images: five convolutions and three dense layers.

    C(5x5)-P-C(3x3)-P-C(3x3)-C(3x3)-C(3x3)-P with 1, 3, 6, 4, 4 times `width` channels, then F-F with 16 times `width`
    units and the classes (the original has `width` 64, 4,096 units, 11x11 kernels with stride 4, and dropout). Drawn by
    He's rule, without which plain SG does not start on eight layers.
    """
    w = width
    layers = [(w, 5, 2), None, (3 * w, 3, 1), None, (6 * w, 3, 1), (4 * w, 3, 1), (4 * w, 3, 1), None]
    model = _network(channels, batch_norm, layers, 4, (16 * w, 16 * w), classes)
    _he_init(model)
    return model


def vgg11(channels: int = 3, batch_norm: bool = False, width: int = 64, classes: int = 10) -> nn.Sequential:
    """VGG-11 (configuration A) for 32x32 images: eight 3x3 convolutions and three dense layers, He's weights.

    The convolutions have 1, 2, 4, 4, 8, 8, 8, 8 times `width` channels, the dense layers 8 times `width` units (the
    original has 4,096).
    """
    w = width
    sizes = [w, None, 2 * w, None, 4 * w, 4 * w, None, 8 * w, 8 * w, None, 8 * w, 8 * w, None]
    layers = [None if size is None else (size, 3, 1) for size in sizes]
    model = _network(channels, batch_norm, layers, 1, (8 * w, 8 * w), classes)
    _he_init(model)
    return model


class L2Term(nn.Module):
    """½·l2·Σw² over the weights of all Linear and Conv2d (not biases), as a term of the training loss (§4.2).

    The last module of a network: it returns its input, and in training adds l2·w to the weights' gradients. The term
    passes through the optimizer like any gradient, eq. 3 included, while the recorded loss is without it.
    """

    def __init__(self, model: nn.Module, l2: float) -> None:
        super().__init__()
        self.l2 = l2
        self.layers = tuple(m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        weights = [layer.weight for layer in self.layers]
        return _L2Gradient.apply(x, self.l2, *weights) if self.training else x


class _L2Gradient(torch.autograd.Function):
    """`x`, with l2·w added to the gradient of each weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, l2: float, *weights: Tensor) -> Tensor:
        ctx.l2 = l2
        ctx.save_for_backward(*weights)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], None, *(ctx.l2 * w for w in ctx.saved_tensors)


class CharTransformer(nn.Module):
    """A small causal language model over characters, pre-norm, GELU, learned positions, no dropout or batch norm."""

    def __init__(self, vocabulary: int, batch_norm: bool = False) -> None:
        if batch_norm:
            raise ValueError("transformer: there is no batch-norm version of it.")
        super().__init__()
        context, width, depth, heads = 128, 128, 4, 4
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, time, vocabulary] of the next character."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.position(places), mask=self.mask, is_causal=True))


def _network(
    channels: int,
    batch_norm: bool,
    layers: Sequence[tuple[int, int, int] | None],
    side: int,
    dense: Sequence[int],
    classes: int,
) -> nn.Sequential:
    """Convolutions (units, kernel, padding), or None for pooling, down to `side` pixels; dense layers; the classes."""
    modules: list[nn.Module] = []
    for layer in layers:
        if layer is None:
            modules.append(nn.MaxPool2d(2))
        else:
            units, kernel, padding = layer
            modules += _unit(nn.Conv2d(channels, units, kernel, padding=padding), batch_norm)
            channels = units
    inputs = channels * side * side
    modules.append(nn.Flatten())
    for units in dense:
        modules += _unit(nn.Linear(inputs, units), batch_norm)
        inputs = units
    return nn.Sequential(*modules, nn.Linear(inputs, classes))


def _unit(layer: nn.Conv2d | nn.Linear, batch_norm: bool) -> list[nn.Module]:
    """A layer, batch norm if wanted, and a ReLU."""
    if not batch_norm:
        return [layer, nn.ReLU()]
    if isinstance(layer, nn.Conv2d):
        return [layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU()]
    return [layer, nn.BatchNorm1d(layer.out_features), nn.ReLU()]


def _he_init(model: nn.Module) -> None:
    """Weights of variance 2/fan-in and zero biases, for every Linear and Conv2d."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "paper_cnn": paper_cnn,
    "deep_net": deep_net,
    "alexnet": alexnet,
    "vgg11": vgg11,
    "transformer": CharTransformer,
}
