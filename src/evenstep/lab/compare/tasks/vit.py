"""A vision transformer of ViT-tiny's width on CIFAR-10 with augmentation."""

from functools import partial

import torch
from torch import Tensor, nn

from .images import ImageTask
from .transformer import Block, draw_weights


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
        """Logits of the classes."""
        x = self.patches(x).flatten(2).mT + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


TASKS = {
    "vit": ImageTask(
        ViT,
        steps=10 * 351,
        batch=128,
        small=partial(ViT, 24, 1),
        warm_up=351,
        mixed=True,
        seen="this network",
    )
}
