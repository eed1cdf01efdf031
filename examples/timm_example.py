"""UnitStep by its name in timm: register it once, create it by the string, attach it to the model.

timm gives an optimizer the parameters alone, so the model is attached afterwards.

    pip install timm && python examples/timm_example.py
"""

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.optim._optim_factory import OptimInfo, default_registry
from torch.nn import functional

import evenstep


def main(steps: int = 20) -> dict[str, float]:
    """A few steps of a small vision transformer on noise with a bright corner."""
    torch.manual_seed(0)
    default_registry.register(OptimInfo(name="evenstep", opt_class=evenstep.UnitStep, has_eps=True, has_momentum=True))
    model = timm.create_model("test_vit", num_classes=2)
    optimizer = create_optimizer_v2(model, "evenstep", lr=0.02, weight_decay=0.01)
    optimizer.attach(model)
    size = model.default_cfg["input_size"][-1]
    losses = []
    for _ in range(steps):
        y = torch.randint(0, 2, (8,))
        x = torch.randn(8, 3, size, size)
        x[y == 1, :, : size // 2, : size // 2] += 2
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rows = optimizer.coverage()
    return {"first": losses[0], "last": losses[-1], "whitened": sum(row.treatment == "whitened" for row in rows)}


if __name__ == "__main__":
    print(main())
