"""An LSTM language model of bytes on Python source."""

from functools import partial

from torch import Tensor, nn

from .text import TextTask


class LSTM(nn.Module):
    """An embedding, two layers of LSTM, and a head; PyTorch's first weights."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.token, self.body = nn.Embedding(256, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte."""
        return self.head(self.body(self.token(tokens))[0])


TASKS = {
    "lstm": TextTask(
        LSTM,
        steps=1000,
        batch=64,
        small=partial(LSTM, 16),
        warm_up=100,
        context=128,
        windows=512,
    )
}
