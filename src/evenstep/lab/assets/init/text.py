"""A small GPT and a text for evenstep. Replace the text and the network by yours, then run: evenstep tune FILE."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

CONTEXT, WIDTH, DEPTH, BATCH, STEPS = 64, 64, 2, 32, 100
TEXT = Path(str(nn.functional.__file__)).read_text()  # source of PyTorch; yours: Path("book.txt").read_text()
NUMBERS = torch.tensor(list(TEXT.encode()))  # one number per byte, 0 to 255
SPLIT = len(NUMBERS) * 9 // 10


class GPT(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, DEPTH, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, time, 256] of the next byte."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return self.head(self.blocks(h, mask=mask, is_causal=True))


def model() -> nn.Module:
    """Return a new network, with random first weights; evenstep moves it to the device."""
    return GPT()


def batches(train: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches (inputs, targets): of the training text, or of the part that is held out.

    A DataLoader or a list of batches is as good. Here an "epoch" is STEPS batches from random places.
    """
    part = NUMBERS[:SPLIT] if train else NUMBERS[SPLIT:]
    for _ in range(STEPS if train else 10):  # held-out batches are the same ones every time: the random seed is
        starts = torch.randint(len(part) - CONTEXT - 1, (BATCH, 1))
        window = part[starts + torch.arange(CONTEXT + 1)]
        yield window[:, :-1], window[:, 1:]


# loss() may be left out: class numbers as targets mean cross-entropy; a Transformers model on dicts has its own loss.
def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch, a tensor of one number."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
