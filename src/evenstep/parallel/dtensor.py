"""Parameters that are sharded over ranks (DTensors, as FSDP2 makes them): each rank moves its own rows.

FSDP2 shards dim 0, the units of a layer; coordinates act along its inputs, so only numbers per layer are reduced. State
per row or element is a DTensor placed like its parameter; all other state is the same plain tensor on every rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..math.segments import Segments

PLAIN = (Tensor, torch.nn.Parameter)


def sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; without the import of DTensor, which is slow."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: all of a plain one."""
    return tensor.to_local() if sharded(tensor) else tensor  # type: ignore[attr-defined]


def visible(x: Tensor | None, dim: int) -> Tensor | None:
    """This rank's part of a layer's input; None if that is a part of the inputs, which lie along `dim`."""
    if x is None or not sharded(x):
        return x
    split = any(getattr(place, "dim", None) == dim for place in x.placements)  # type: ignore[attr-defined]
    return None if split else local(x)


def groups_along(tensor: Any, rows: bool) -> list[Any]:
    """The groups of ranks over which dim 0 (`rows`), or any other dimension, of a tensor is split."""
    if not sharded(tensor):
        return []
    found = enumerate(tensor.placements)
    return [tensor.device_mesh.get_group(k) for k, place in found if hasattr(place, "dim") and (place.dim == 0) is rows]


def row_group(tensor: Any) -> Any:
    """The ranks that have some rows of a tensor each, as `row_counts` says; None if it lies in another way."""
    if not sharded(tensor) or tensor.device_mesh.ndim != 1:
        return None
    from torch.distributed.tensor import Shard

    place = tensor.placements[0]
    return tensor.device_mesh.get_group() if type(place) is Shard and place.dim == 0 else None


def row_counts(rows: int, world: int) -> list[int]:
    """How many rows each rank has of a sharded tensor.

    >>> row_counts(7, 3), row_counts(1, 2)
    ([3, 3, 1], [1, 0])
    """
    each = -(-rows // world)
    return [max(0, min(each, rows - each * rank)) for rank in range(world)]


class ShardedSegments(Segments):
    """Layers whose units lie on several ranks: reductions over all of them, which every rank must call."""

    def __init__(self, sizes: Sequence[int], device: torch.device, groups: Sequence[Any]) -> None:
        """`groups` are the groups of ranks over which rows are split."""
        super().__init__(sizes, device)
        self.groups = groups

    def total(self, x: Tensor) -> Tensor:
        """Sums over all ranks, one per layer."""
        return reduced(super().total(x), self.groups)

    def totals(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Several sums, in one reduction over ranks."""
        return reduced(torch.stack([super(ShardedSegments, self).total(x) for x in xs]), self.groups).unbind()

    def mean(self, x: Tensor) -> Tensor:
        """Means over all ranks, repeated for each element of their layer that this rank has."""
        total, count = self.totals(x, torch.ones_like(x))
        return self.widen(total / count.clamp(min=1))

    def most(self, x: Tensor) -> Tensor:
        """Largest elements over all ranks, one per layer."""
        return reduced(super().most(x), self.groups, dist.ReduceOp.MAX)


def segments(sizes: Sequence[int], like: Tensor, has_rows: bool) -> Segments:
    """The units of layers that are sharded as `like` is: reductions over the ranks that their rows are split over."""
    groups = groups_along(like, rows=True) if has_rows else []
    return ShardedSegments(sizes, like.device, groups) if groups else Segments(sizes, like.device)


def reduced(x: Tensor, groups: Sequence[Any], how: Any = None) -> Tensor:
    """Each element reduced over ranks; summed, unless `how` says otherwise."""
    if groups:
        x = x.contiguous().clone()
    for group in groups:
        dist.all_reduce(x, how or dist.ReduceOp.SUM, group)
    return x


def part(whole: Tensor, p: Any) -> Tensor:
    """This rank's part of a tensor that every rank has, rows placed like those of `p`."""
    from torch.distributed.tensor import distribute_tensor

    placed: Any = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
    return local(placed)


def placed(own: Tensor, p: Any, shape: Sequence[int] | None = None) -> Tensor:
    """This rank's part of a tensor as a DTensor placed like `p`; `shape` is that of the whole, if not that of `p`."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size(p.shape if shape is None else shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)


def whole(tensor: Any) -> Tensor:
    """All of a tensor, gathered if need be."""
    found: Tensor = tensor.full_tensor() if sharded(tensor) else tensor
    return found


def matched(saved: Tensor, live: Any) -> Tensor:
    """A saved tensor placed as a live one is."""
    if sharded(live) and not sharded(saved):
        return placed(part(saved.to(live.device), live), live, saved.shape)
    return whole(saved) if sharded(saved) and isinstance(live, Tensor) and not sharded(live) else saved


def whole_shape(p: Tensor, grad: Tensor) -> torch.Size:
    """The shape of what `grad` is a part of: the parameter's, or that of its layer as one matrix."""
    joint = grad.dim() == 2 and (p.dim() != 2 or grad.shape[1] != local(p).shape[1])
    return torch.Size([p.shape[0], grad.shape[1]]) if joint else p.shape


def gathered(p: Tensor, grad: Tensor) -> Tensor:
    """The whole of a gradient on v of which each rank has a part."""
    return whole(placed(grad, p, whole_shape(p, grad)))
