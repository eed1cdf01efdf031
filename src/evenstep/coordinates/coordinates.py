"""What a coordinate system is, and the numbers it works on. To add one: a class here, used by an optimizer class.

A step treats many layers at once. What belongs to inputs or units is packed into flat tensors, one layer after another;
what belongs to a layer is a tensor with one number per layer.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from ..math.change_of_variables import Scales
from ..math.segments import Segments


class Statistics(IntEnum):
    """What the hooks must add up for a coordinate system; each includes those before it."""

    NOTHING = 0
    COUNTS = 1  # rows, examples, uses of the weight
    INPUTS = 2  # sums of the inputs and of their squares
    GRADIENTS = 3  # squared gradients of the outputs, too


class Field(NamedTuple):
    """A tensor of the optimizer's state: what it has one number for, and whether it may be negative.

    A "parameter" field is shaped like the parameter and sharded as it is, in its dtype unless it is `wide`; "count" is
    one number beside each parameter. All other fields belong to the weight of a block: one number per "layer", "group",
    "input" or "output" of the layer, the same on all ranks, or one per "unit" of the weight, sharded as its rows are. A
    "matrix" is the whole block, [unit, inputs · kernel + biases], sharded by rows; a "line" is a row of it, or a column
    where there are more of those. What is not in the parameter's dtype is in float32 or better.
    """

    per: Literal["parameter", "count", "layer", "group", "input", "output", "unit", "matrix", "line"]
    nonnegative: bool = False
    wide: bool = False
    initial: float = 0.0


Schema = Mapping[str, Field]  # the one list that initialization, checkpoints, DTensors and kernels read


class Batch(NamedTuple):
    """What the hooks added up since the last step."""

    rows: Tensor  # per layer
    applied: Tensor  # per layer: how often its weight was used
    examples: Tensor  # per layer
    usable: Tensor  # per layer: whether it has rows, and all its sums are finite
    offset: Tensor | None = None  # per input: mean less centre
    var: Tensor | None = None  # per input
    centre: Tensor | None = None  # per input
    g2: Tensor | None = None  # per output: Σ ĝ²
    # whether the host knows that all layers have moments and usable sums about their running means: no masks are needed
    complete: bool = False


class Layers(NamedTuple):
    """The layers of a step: how they are packed, and the parameter group whose settings they share."""

    inputs: Segments
    outputs: Segments  # units of the whole layers, wherever their rows are
    fan_in: Tensor  # per layer: n of §3.5
    biased: bool  # whether their biases train with them
    group: Mapping[str, Any]


class Coordinates:
    """A coordinate system. This one is plain: v is w."""

    name: str = "plain"
    needs: Statistics = Statistics.NOTHING
    state: ClassVar[Schema] = {}
    beta_per_output: bool = False  # otherwise β is one number per layer
    # flags of the kernel that finds them; a class without `fused` of its own is left to torch operations
    fused: Sequence[str] = ()

    def __init__(self, *, linear: bool = True) -> None:
        """`linear` is whether the rule is. One that normalizes gets β = 1: (n·S)^(−1/4) was measured, and lost."""
        self.linear = linear

    def at(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> Scales:
        """The coordinates of this step. `state` has a flat tensor per field."""
        return Scales()

    def after(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> dict[str, Tensor]:
        """The state after this step: the batch joins the moments."""
        return {}
