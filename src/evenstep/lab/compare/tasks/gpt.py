"""Byte GPTs of two widths on Python source."""

from functools import partial

from torch import Tensor, nn

from .text import TextTask
from .transformer import Block, draw_weights


class GPT(nn.Module):
    """A language model of bytes with learned positions and an untied head."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        draw_weights(self, depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte."""
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def task(width: int, depth: int, steps: int, seen: str) -> TextTask:
    """A tenth of the steps is warm-up."""
    build, small = partial(GPT, width, depth, 256), partial(GPT, 24, 1, 16)
    return TextTask(build, steps, 64, small, warm_up=steps // 10, mixed=True, seen=seen)


TASKS = {
    "gpt-384": task(384, 6, 800, "this network"),
    "gpt-768": task(768, 6, 600, "nets like it, 384 and 1,024 wide"),
}
