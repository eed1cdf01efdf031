"""The optimizer to try first: orthogonalized momentum in whitened coordinates."""

from dataclasses import KW_ONLY
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .coordinates.coordinates import Coordinates, Statistics
from .coordinates.plain_size import PlainSize
from .model.survey import Entry
from .optimizers import WithMoments
from .options import preset
from .rules.check_torch_class import TorchClass
from .rules.orthogonal import OrthogonalRule
from .rules.torch_rule import TorchRule
from .step.block import Block, Choice, Group
from .torch_optimizer.optimizer_step import CoordinateOptimizer


@preset
class EvenStep(WithMoments):
    """The one to try first: orthogonalized momentum in whitened coordinates, relative to the weights, with guards.

    Every layer but the head is a matrix [unit, inputs · kernel + 1] that moves along the polar factor of its momentum:
    no direction takes longer steps than another. A step is `lr` times as long as the weights, so that one lr serves
    layers of any size. Weights keep within their norm before the first step, or rows of length 1 where that is more.

    The head, embeddings, norms, vectors and layers with one unit or input in a group are moved by AdamW at `plain_lr`.
    The head is the layer that was called last in the first forward pass.

    State: one momentum buffer, one float per row or column of a layer, two per input; two buffers where AdamW moves.
    """

    coordinates = PlainSize
    rule = OrthogonalRule()
    _copied = "_rest", "_torch_rules"
    _direct = _disable_dynamo(CoordinateOptimizer._direct)  # compilers do not make parameters, as the stand-ins are
    lr: float | Tensor = 0.025
    _: KW_ONLY
    momentum: float = 0.9
    decay: float = 0.99
    head: str | None = "auto"
    plain_lr: float | None = 3e-3

    def __post_init__(self) -> None:
        adamw = TorchClass(type(self).__name__, torch.optim.AdamW, {"betas": (0.9, 0.95)})
        self._torch_rules, self._rest = (adamw,), TorchRule(adamw, adamw, own_options=True)
        super().__post_init__()

    def _detached(self) -> None:
        super()._detached()
        self._head: Tensor | None = None

    def _choose(self, group: Group, entry: Entry | None, alone: bool) -> Choice:
        """Matrices of hidden layers are orthogonalized; all else is for AdamW."""
        if entry is None or alone:
            return self._kept(Coordinates, self._rest), self._rest, True
        visible = entry.slot.input_visible
        if thin(entry) or self._is_head(group, entry):
            return self._kept(self.coordinates if visible else Coordinates, self._rest), self._rest, True
        if not visible:
            return self._kept(Coordinates, self.rule), self.rule, False
        return self._kept(self.coordinates, self.rule), self.rule, False

    def _remark(self, block: Block, p: Tensor) -> str:
        """Which parameters AdamW moves, and why those of layers."""
        if block.rule is self.rule:
            return "its input is not seen" if block.coordinates.needs is Statistics.NOTHING else ""
        why, entry = "", block.entry
        if entry is not None and not block.alone:
            known = self._statistics.forwards.last is not None or self.state or block.group["head"] != "auto"
            head = ": the head" if known else ": the head, unless another layer is called last"
            why = head if self._is_head(block.group, entry) else ": one unit or input per group"
        elif self._left_out.get(id(p), "").startswith("shared by"):
            why = ": the head"
        return f"moved by AdamW{why}"

    def _is_head(self, group: Group, entry: Entry) -> bool:
        if group["head"] == "auto":
            return entry.weight is self._head
        return group["head"] is not None and fnmatchcase(entry.name, group["head"])

    def _blocks(self, *args: Any) -> list[Block]:
        self._head = self._found_head()
        return super()._blocks(*args)

    def _found_head(self) -> Tensor | None:
        """The layer called last, or registered last before any call; none where the head is an embedding's weight.

        Once there is state, it is the layer that has AdamW's: so checkpoints keep the head, whatever its name.
        """
        if any(reason.startswith("shared by") for reason in self._left_out.values()):
            return None
        last = self._statistics.forwards.last
        seen = [(e, e.weight, layer) for e, layer in self._statistics.layers.items() if e.slot.input_visible]
        state = {weight: self._loading.get(weight, self.state.get(weight, {})) for _, weight, _ in seen}
        known = [weight for entry, weight, _ in seen if "exp_avg" in state[weight] and not thin(entry)]
        weights = known or [weight for _, weight, layer in seen if layer is last or last is None]
        return weights[-1] if weights else None


def thin(entry: Entry) -> bool:
    """Whether a layer has one unit or one input in a group: the polar factor of such a matrix is its direction."""
    return min(entry.shape[1], entry.shape[2:].numel()) < 2
