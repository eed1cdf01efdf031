"""UnitStep with Accelerate: prepare it with the model; micro-batches, clipping and checkpoints as usual.

pip install "evenstep[integrations]" && python examples/accelerate_example.py
"""

import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import evenstep


def bars(count: int = 256) -> TensorDataset:
    """Noisy vectors with a bright element; the class is where it is."""
    y = torch.randint(0, 8, (count,))
    x = 0.5 * torch.randn(count, 8) + 1
    x[torch.arange(count), y] += 2
    return TensorDataset(x, y)


def main(epochs: int = 16, mixed_precision: str = "no") -> float:
    """Train with two micro-batches a step, save and load half way, and return the accuracy on new data."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = evenstep.UnitStep(model, lr=0.05)
    loader = DataLoader(bars(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if epoch == epochs // 2:
            with tempfile.TemporaryDirectory() as folder:
                accelerator.save_state(folder)
                accelerator.load_state(folder)
    with torch.no_grad():
        x, y = bars().tensors
        return (model(x).argmax(1) == y).float().mean().item()


if __name__ == "__main__":
    print(main())
