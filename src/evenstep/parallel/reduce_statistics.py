"""One network on several ranks: all-reduce the batch statistics before a step.

DDP and FSDP average gradients, not statistics. With the sums of all ranks, each takes the same step from the same
numbers. All ranks of the group must call `step()`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ..math.moments import Sums, recentre
from ..statistics.hooks import ModelStatistics
from ..statistics.layer_statistics import LayerStatistics
from ..step.block import all_finite


def ranks_of(group: Any) -> Any:
    """The group to reduce over in this step, where torch.distributed runs; None if this process trains alone."""
    if group is False:
        return None
    return None if dist.get_world_size(group) == 1 else group or dist.group.WORLD


class Part(NamedTuple):
    """The statistics of a layer, the mass of its running mean (None: only counts), how the loss was reduced."""

    layer: LayerStatistics
    mass: Tensor | None
    reduction: str

    def tensors(self) -> list[Tensor]:
        """What ranks add up, where the layer keeps it: counts, sums about the centre, squared gradients."""
        layer = self.layer
        sums = [] if self.mass is None else [layer.in_one_slot()]
        return [layer.tally, *sums, *([layer.g2] if layer.units else [])]

    def examples2(self) -> Tensor | int:
        """With a mean loss a rank's gradients are divided by its own number of examples: the square of that."""
        return self.layer.examples.clamp(min=1) ** 2 if self.reduction == "mean" else 1


class Reduced(NamedTuple):
    """What ranks know of each other: whether all gradients are finite, how many are busy, whether they agree."""

    finite: Tensor
    busy: Tensor
    agree: Tensor | None


def reduce(
    ranks: Any,
    statistics: ModelStatistics,
    parts: Sequence[Part],
    grads: Sequence[Tensor],
    bits: Tensor | None = None,
    *,
    busy: bool,
) -> Reduced:
    """Add up statistics over ranks, in place; `bits` are what ranks must agree on, if anything."""
    tensors = [t for part in parts for t in part.tensors()]
    device = next((t.device for t in [*tensors, *grads]), torch.device("cpu"))
    if not statistics.same_layers:
        check_same_layers(ranks, sum(t.numel() for t in tensors), device)
        statistics.same_layers = True
    share_centres(ranks, [part for part in parts if part.mass is not None and not part.layer.settled])
    for part in parts:
        part.layer.g2.mul_(part.examples2())
    # one reduction for sums and flags: no rank may skip a step alone
    flags = torch.stack([~all_finite(grads, device), torch.full((), busy, device=device)]).float()
    flags = flags if bits is None else torch.cat([flags, bits.to(device)])
    add_up(ranks, [flags, *tensors])
    for part in parts:
        part.layer.g2.div_(part.examples2())
    agree = None if bits is None else ((flags[2:] == 0) | (flags[2:] == ranks.size())).all()
    return Reduced(flags[0] == 0, flags[1], agree)


def check_same_layers(ranks: Any, size: int, device: torch.device) -> None:
    """Check that all ranks add up the same layers: others would wait for each other, or add nonsense."""
    both = torch.tensor([size, -size], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, ranks)
    most, least = both.tolist()
    if most != -least:
        raise RuntimeError(
            f"the ranks of process_group train different layers ({-least} to {most} statistics); give the group of "
            "those that hold copies of one model, or process_group=False to reduce nothing."
        )


def share_centres(ranks: Any, parts: Sequence[Part]) -> None:
    """Move sums that may have centres of their own to the mean of the ranks' centres.

    Only sums about a common centre can be added up. That is the running mean once there is one, which a `settled` layer
    is known to have; until then each rank has its own first row.
    """
    if not parts:
        return
    layers = [part.layer for part in parts]
    known = [~layer.centre.isnan() for layer in layers]
    centres = [torch.where(k, layer.centre, 0) for k, layer in zip(known, layers, strict=True)]
    counts = [k.to(c.dtype) for k, c in zip(known, centres, strict=True)]
    add_up(ranks, [*centres, *counts])
    for layer, mine, total, count in zip(layers, known, centres, counts, strict=True):
        sums, common = layer.in_one_slot(), total / count  # NaN where no rank saw a row
        moved = recentre(Sums(layer.rows, *sums), torch.where(mine, common - layer.centre, 0))
        sums.copy_(torch.stack([moved.first, moved.second]))
        layer.centre.copy_(common)
    if not (layers[0].tally.is_cuda and torch.cuda.is_current_stream_capturing()):
        for part in parts:  # reads the device, but never again for a layer that is settled
            part.layer.settled = part.mass is not None and bool(part.mass > 0)


def add_up(ranks: Any, tensors: Sequence[Tensor]) -> None:
    """Sum each tensor over ranks, in place, by one flat reduction (one per device and dtype, if there are several)."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for some in kinds.values():
        flat = torch.cat([tensor.flatten() for tensor in some])
        dist.all_reduce(flat, group=ranks)
        for tensor, total in zip(some, torch.split_with_sizes(flat, [t.numel() for t in some]), strict=True):
            tensor.copy_(total.view_as(tensor))
