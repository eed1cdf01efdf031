"""Write tests/fixtures/format-N.pt: checkpoints of several optimizers half way through a run.

Run it when the format of checkpoints changes, and keep the old files: tests/test_checkpoints.py loads all of them.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from cases import OPTIMIZERS
from evenstep.torch_optimizer.checkpoint import FORMAT

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures"
NAMES = ["whitened-decayed", "fan-in-momentum", "canonical", "unitstep", "whitened-sgd", "whitened-adamw"]
NAMES += ["whitened-muon", "unit", "weight"]


def network() -> nn.Sequential:
    """A convolution, a norm and a Linear: layers and plain parameters."""
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 2))


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train(model: nn.Module, optimizer: Any, batches: torch.Tensor) -> None:
    """A step on each batch."""
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def main() -> None:
    """Train each optimizer for three steps and save it with its weights."""
    torch.manual_seed(0)
    saved = {}
    for name in NAMES:
        model = network()
        optimizer = OPTIMIZERS[name].build(model)
        train(model, optimizer, torch.randn(3, 5, 2, 3) + 1)
        saved[name] = {"weights": flat(model), "state_dict": optimizer.state_dict()}
    torch.save(saved, FIXTURES / f"format-{FORMAT}.pt")


if __name__ == "__main__":
    FIXTURES.mkdir(exist_ok=True)
    main()
