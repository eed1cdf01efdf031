"""UnitStep in a plain training loop: groups for weight decay, a schedule, clipping, a checkpoint half way.

python examples/plain_loop.py
"""

import io

import torch
from torch import Tensor, nn
from torch.nn import functional

import evenstep


def images(count: int = 512) -> tuple[Tensor, Tensor]:
    """Noisy 8x8 images with a bright bar; the class is the row it is in."""
    y = torch.randint(0, 8, (count,))
    x = 0.7 * torch.randn(count, 1, 8, 8)
    x[torch.arange(count), 0, y] += 1.5
    return x, y


def network() -> nn.Sequential:
    """A small convolutional network without batch norm."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(256, 8)
    )


def main(steps: int = 80) -> dict[str, float]:
    """Train, and report the accuracy on new images."""
    torch.manual_seed(0)
    model, (x, y) = network(), images()
    optimizer = evenstep.UnitStep(evenstep.decay_groups(model, 0.01), lr=0.05, model=model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        chosen = torch.randint(0, len(x), (64,))
        loss = functional.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step == steps // 2:  # saved and loaded as with any torch optimizer
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
    optimizer.detach()  # takes the hooks off: the model can be exported
    with torch.no_grad():
        x, y = images()
        accuracy = (model(x).argmax(1) == y).float().mean()
    return {"loss": loss.item(), "accuracy": accuracy.item()}


if __name__ == "__main__":
    print(main())
