"""Transformer blocks and their first weights, shared by tasks."""

import math

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
        """Attention, then two dense layers, both added to the stream."""
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
