"""Convolutions as matrix products: many members' small convolutions are one batched product under `vmap`."""

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional


def as_matrix_products(model: nn.Module) -> None:
    """Make every plain Conv2d of `model` compute by `product` (a grouped or dilated one stays as it is)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and _plain(module):
            module.forward = MethodType(product, module)  # type: ignore[method-assign]


def _plain(layer: nn.Conv2d) -> bool:
    """Whether `product` knows this convolution."""
    dense = layer.groups == 1 and layer.dilation == (1, 1)
    return dense and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def product(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What the convolution gives: its weight as a matrix times the shifted images, one for each kernel position."""
    assert not isinstance(layer.padding, str)
    (up, left), (down, right), (rows, columns) = layer.padding, layer.stride, layer.kernel_size
    x = functional.pad(x, (left, left, up, up)) if up or left else x
    height, width = (x.shape[2] - rows) // down + 1, (x.shape[3] - columns) // right + 1
    shifted = [
        x[:, :, i : i + down * height : down, j : j + right * width : right]
        for i in range(rows)
        for j in range(columns)
    ]
    y = layer.weight.flatten(1) @ torch.stack(shifted, 2).flatten(1, 2).flatten(2)
    y = y.unflatten(2, (height, width))
    return y if layer.bias is None else y + layer.bias[:, None, None]
