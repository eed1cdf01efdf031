"""One network on several ranks: what each saw of its share of the batch becomes what all saw, before a step.

DDP and FSDP average gradients, not statistics. In `step()` every rank adds its staged sums to those of the others, so
that all take the same step from the same numbers. All ranks of the group must call `step()` together.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ..math.moments import Sums, recentre
from ..statistics.batch import LayerStatistics
from ..step.block import all_finite, gradient

CHOICES = "None (the world group), False (never reduce) or a group of torch.distributed that this process is in"


def checked(owner: str, group: Any) -> Any:
    """What was given for process_group, if it is allowed."""
    if group is None or group is False or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return group
    raise ValueError(f"{owner}: process_group must be {CHOICES}; got {group!r}.")


def lasting(group: Any) -> Any:
    """A process_group as a copy of the optimizer keeps it: a group by its name, since groups cannot be pickled."""
    return group if group is None or group is False or isinstance(group, str) else group.group_name


def ranks_of(group: Any) -> Any:
    """The group to reduce over in this step; None if this process trains alone."""
    if group is False or not (dist.is_available() and dist.is_initialized()):
        return None
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    return None if dist.get_world_size(group) == 1 else group or dist.group.WORLD


class Agreed(NamedTuple):
    """What the ranks found together: whether all gradients are finite, and how many ranks have something to do."""

    finite: Tensor
    busy: Tensor


class Part(NamedTuple):
    """A stage to be added up: the mass of its running mean (None: it has counts alone), how the loss was reduced."""

    stage: LayerStatistics
    mass: Tensor | None
    reduction: str


class Pool:
    """The reduction of one optimizer's stages.

    Sums can be added up about a common centre alone. That is the running mean once there is one, which a `settled`
    stage is known to have; until then each rank has its own first row, and ranks agree on the mean of those.
    """

    def __init__(self) -> None:
        """Nothing is known of the other ranks."""
        self.settled: set[LayerStatistics] = set()
        self.same = False

    def reduce(self, ranks: Any, parts: Sequence[Part], grads: Sequence[Tensor], *, busy: bool) -> Agreed:
        """Add up over ranks what the stages hold, in place, and whether `grads` are finite."""
        device = next((t.device for t in [*(part.stage.tally for part in parts), *grads]), torch.device("cpu"))
        waiting = [part for part in parts if part.mass is not None and part.stage not in self.settled]
        self._compare(ranks, [values(part) for part in parts], device)
        self._agree(ranks, waiting)
        flags = torch.stack([~all_finite(grads, device), torch.full((), busy, device=device)]).float()
        (wrong, working), *totals = summed(ranks, [flags, *(v for part in parts for v in values(part))])
        for part in parts:
            put(part, [totals.pop(0) for _ in values(part)])
        return Agreed(wrong == 0, working)

    def _compare(self, ranks: Any, found: Sequence[Sequence[Tensor]], device: torch.device) -> None:
        """See once that all ranks add up the same layers: otherwise they would wait for each other, or add nonsense."""
        if self.same:
            return
        size = sum(v.numel() for vs in found for v in vs)
        both = torch.tensor([size, -size], device=device)
        dist.all_reduce(both, dist.ReduceOp.MAX, ranks)
        most, least = both.tolist()
        if most != -least:
            raise RuntimeError(
                f"the ranks of process_group train different layers ({-least} to {most} statistics); give the group of "
                "those that hold copies of one model, or process_group=False to reduce nothing."
            )
        self.same = True

    def _agree(self, ranks: Any, waiting: Sequence[Part]) -> None:
        """Move sums that may have centres of their own to the mean of the ranks' centres."""
        if not waiting:
            return
        stages = [part.stage for part in waiting]
        known = [~stage.centre.isnan() for stage in stages]
        own = [torch.where(k, stage.centre, 0) for k, stage in zip(known, stages, strict=True)]
        totals = summed(ranks, [*own, *(k.to(c.dtype) for k, c in zip(known, own, strict=True))])
        for stage, mine, total, count in zip(stages, known, totals, totals[len(stages) :], strict=False):
            common = total / count  # NaN where no rank saw a row
            moved = recentre(Sums(stage.rows, *stage.slots.sum(0)), torch.where(mine, common - stage.centre, 0))
            put_sums(stage, torch.stack([moved.first, moved.second]))
            stage.centre.copy_(common)
        if not (stages[0].tally.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.settled |= {part.stage for part in waiting if part.mass is not None and part.mass > 0}


def values(part: Part) -> list[Tensor]:
    """What a rank adds to the others': counts, sums about the centre, squared gradients.

    With a mean loss a rank's gradients are divided by its own number of examples, so that number is taken out.
    """
    stage = part.stage
    sums = [] if part.mass is None else [stage.slots.sum(0)]
    examples2 = stage.examples**2 if part.reduction == "mean" else 1
    return [stage.tally, *sums, *([stage.g2 * examples2] if stage.units else [])]


def put(part: Part, totals: Sequence[Tensor]) -> None:
    """Write what all ranks have added up to where a stage keeps its own; what `values` took out is put back."""
    stage = part.stage
    stage.tally.copy_(totals[0])
    if part.mass is not None:
        put_sums(stage, totals[1])
    if stage.units:
        stage.g2.copy_(totals[-1] / stage.examples.clamp(min=1) ** 2 if part.reduction == "mean" else totals[-1])


def pulled(ranks: Any, params: Sequence[Tensor]) -> set[int]:
    """The ids of parameters whose gradient is not zero, here or on any of `ranks` (reads the device)."""
    found = torch.zeros(len(params), device=params[0].device if params else None)
    for k, p in enumerate(params):
        if p.grad is not None:
            found[k] = gradient(p).any()
    if ranks is not None:
        dist.all_reduce(found, group=ranks)
    return {id(p) for p, number in zip(params, found.tolist(), strict=True) if number}


def put_sums(stage: LayerStatistics, sums: Tensor) -> None:
    """Let these be the stage's sums: in its first slot, the others empty."""
    stage.slots.zero_()
    stage.slots[0].copy_(sums)


def summed(ranks: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor summed over ranks, by one flat reduction (one per device and dtype, where there are several)."""
    found: dict[int, Tensor] = {}
    kinds: dict[Any, list[int]] = {}
    for k, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(k)
    for some in kinds.values():
        flat = torch.cat([tensors[k].flatten() for k in some])
        dist.all_reduce(flat, group=ranks)
        for k, part in zip(some, torch.split_with_sizes(flat, [tensors[k].numel() for k in some]), strict=True):
            found[k] = part.view(tensors[k].shape)
    return [found[k] for k in range(len(tensors))]
