"""A small net like ConvNeXt: depthwise 7x7 convolutions, layer norm, and dense layers over channels."""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from .images import ImageTask


class Block(nn.Module):
    """A depthwise convolution, layer norm, and two dense layers of width 4 · channels, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C, H, W]; channels are last for the norm and the dense layers."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Two blocks on 2x2 patches, then four of twice the channels on half the pixels."""

    def __init__(self, width: int = 64, depths: tuple[int, int] = (2, 4)) -> None:
        super().__init__()
        first, second = ([Block(k * width) for _ in range(depth)] for k, depth in zip((1, 2), depths, strict=True))
        self.body = nn.Sequential(nn.Conv2d(3, width, 2, 2), *first, nn.Conv2d(width, 2 * width, 2, 2), *second)
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 10)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Logits from the mean over positions."""
        return self.head(self.norm(self.body(x).mean((2, 3))))


TASKS = {
    "convnext": ImageTask(
        ConvNeXt,
        steps=5 * 351,
        batch=128,
        small=partial(ConvNeXt, 8, (1, 1)),
        warm_up=176,
        mixed=True,
    )
}
