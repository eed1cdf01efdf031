"""UnitStep in Lightning: return it from configure_optimizers, with a schedule beside it.

pip install "evenstep[integrations]" && python examples/lightning_example.py
"""

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import evenstep


def bars(count: int = 256) -> TensorDataset:
    """Noisy vectors with a bright element; the class is where it is."""
    y = torch.randint(0, 8, (count,))
    x = 0.5 * torch.randn(count, 8) + 1
    x[torch.arange(count), y] += 2
    return TensorDataset(x, y)


class Classifier(lightning.LightningModule):
    """The optimizer gets `self`, and `training_step` calls `self`, so that calls are counted per forward pass."""

    def __init__(self, steps: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = evenstep.UnitStep(self, lr=0.05)
        schedule = {"scheduler": CosineAnnealingLR(optimizer, self.steps), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main(epochs: int = 8, **options: Any) -> float:
    """Fit, and return the accuracy on the validation set; `options` go to the Trainer."""
    lightning.seed_everything(0, verbose=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", **{**quiet, **options})
    train, val = DataLoader(bars(), batch_size=32, shuffle=True), DataLoader(bars(), batch_size=64)
    trainer.fit(Classifier(epochs * len(train)), train, val)
    return float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    print(main())
