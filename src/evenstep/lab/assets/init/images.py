"""A network and images for evenstep. Replace the data and the network by yours, then run: evenstep tune FILE."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.lab.data import fashion_mnist_subset

CLASSES = 10


def model() -> nn.Module:
    """Return a new network, with random first weights; evenstep moves it to the device."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def batches(train: bool) -> DataLoader:
    """Return batches (inputs, targets): of the training set, or of examples that are held out of it."""
    images = fashion_mnist_subset()  # 5,000 images of the package; your own: torchvision.datasets.ImageFolder(...)
    x, y = (images.train_x, images.train_y) if train else (images.test_x, images.test_y)
    data = TensorDataset(images.normalize(x), y)
    return DataLoader(data, batch_size=64, shuffle=train)


# loss() may be left out: class numbers as targets mean cross-entropy, numbers with a fraction the mean squared error.
def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch, a tensor of one number."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


# metrics() may be left out, too. Its numbers go into the records; "accuracy" is shown in the report.
def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return numbers to report for a held-out batch; evenstep takes their means."""
    inputs, targets = batch
    return {"accuracy": (model(inputs).argmax(1) == targets).float().mean()}


if __name__ == "__main__":  # python FILE: does it run at all?
    print(loss(model(), next(iter(batches(train=True)))), torch.__version__)
