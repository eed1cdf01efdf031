"""Train networks in whitened coordinates: every unit takes an even step.

After "Diagonal Rescaling For Neural Networks" (Lafond, Vasilache, Bottou). An optimizer here is coordinates x rule x
guard; all are `torch.optim.Optimizer`s that take the model as their first argument.
"""

from .batchnorm import fold_batchnorm, insert_batchnorm
from .even_step import EvenStep
from .model.coverage import Coverage
from .model.known_layers import register_layer
from .model.layer_kind import LayerKind, Look, Slot
from .monitor import CurvatureMonitor
from .optimizers import BlockNaturalSGD, CanonicalSGD, FanInSGD, UnitStep, WhitenedSGD
from .weight_decay import decay_groups
from .whitened import Whitened

__version__ = "0.1.0"
__all__ = [
    "BlockNaturalSGD",
    "CanonicalSGD",
    "Coverage",
    "CurvatureMonitor",
    "EvenStep",
    "FanInSGD",
    "LayerKind",
    "Look",
    "Slot",
    "UnitStep",
    "Whitened",
    "WhitenedSGD",
    "decay_groups",
    "fold_batchnorm",
    "insert_batchnorm",
    "register_layer",
]
