"""A network and a table for evenstep. Replace the data and the network by yours, then run: evenstep tune FILE."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 8


def table() -> tuple[Tensor, Tensor]:
    """Return features [rows, FEATURES] and targets [rows], on any scale: EvenStep whitens the inputs of each layer.

    Yours: frame = pandas.read_csv("table.csv"), then torch.tensor(frame[columns].values, dtype=torch.float32).
    """
    x = torch.randn(4000, FEATURES) * torch.tensor([1, 10, 100, 0.1, 1, 1, 5, 1000]) + 3  # made up
    y = torch.sin(x[:, 0]) + 0.02 * x[:, 1] * x[:, 4] + 0.001 * x[:, 7] + 0.1 * torch.randn(len(x))
    return x, y


X, Y = table()
ROWS = torch.randperm(len(X))
SPLIT = len(X) * 8 // 10


def model() -> nn.Module:
    """Return a new network, with random first weights; evenstep moves it to the device."""
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def batches(train: bool) -> DataLoader:
    """Return batches (inputs, targets): of the training rows, or of rows that are held out."""
    rows = ROWS[:SPLIT] if train else ROWS[SPLIT:]
    return DataLoader(TensorDataset(X[rows], Y[rows]), batch_size=64, shuffle=train)


# loss() may be left out: targets with a fraction mean the mean squared error, class numbers cross-entropy.
def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch, a tensor of one number."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs)[:, 0], targets)


# metrics() may be left out, too. Its numbers go into the records.
def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return numbers to report for a held-out batch; evenstep takes their means."""
    inputs, targets = batch
    return {"mean error": (model(inputs)[:, 0] - targets).abs().mean()}
