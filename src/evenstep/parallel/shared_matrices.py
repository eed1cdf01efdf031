"""Matrices that ranks share: one rank, the owner, turns each into a step, and the others take that over.

Replicas (DDP) have all matrices; the owners' steps go to all ranks in one all-gather. Where ranks have some rows of
each matrix (FSDP2), these go to the owners in one all-to-all, and rows of the steps come back in another. All is sent
as bytes, so that tensors of several dtypes go together.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from heapq import heapreplace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from .. import foreach
from . import dtensor

if TYPE_CHECKING:
    from ..rules.rule import Matrices

ALIGNED = 16  # bytes: every tensor in a message begins at a multiple of these


class SharedMatrices:
    """Batches of layers that are alike, each layer owned by one rank. All ranks must call each method."""

    def __init__(self, found: Sequence["Matrices"], ranks: Any, by_rows: bool) -> None:
        """Without `ranks` this one owns all. `by_rows`: each has its rows of all matrices, [layer, row, column]."""
        self.ranks, self.by_rows = ranks, by_rows
        # for each rank the layers that it owns, as this rank has them
        self.owned = [list(found)] if ranks is None else shares(found, ranks.size())
        self.mine = self.owned[0 if ranks is None else ranks.rank()]
        self.by_rank: list[list[Tensor]] = []  # the rows that each rank has of this one's matrices

    def own(self) -> list["Matrices"]:
        """Whole matrices of the layers that this rank owns, to write steps over."""
        if not self.by_rows:
            return self.mine
        world = len(self.owned)
        whole = [m.x.new_empty(len(m.blocks), m.blocks[0].units, m.x.shape[-1]) for m in self.mine]
        rows = [torch.split_with_sizes(w, dtensor.row_counts(w.shape[1], world), 1) for w in whole]
        self.by_rank = [[each[r] for each in rows] for r in range(world)]
        swap([[m.x for m in some] for some in self.owned], self.by_rank, self.ranks)
        shapes = [(len(m.blocks) * m.blocks[0].groups, -1, m.x.shape[-1]) for m in self.mine]
        return [m._replace(x=w.view(shape)) for m, w, shape in zip(self.mine, whole, shapes, strict=True)]

    def spread(self, memory: Callable[[Any], Tensor]) -> None:
        """Bring the owners' steps to all ranks, or each one's rows, and the whole `memory` of each layer."""
        results = [[*(m.x for m in some), *(memory(b) for m in some for b in m.blocks)] for some in self.owned]
        if self.by_rows:
            beside = [memory(b) for m in self.mine for b in m.blocks]
            swap([[*rows, *beside] for rows in self.by_rank], results, self.ranks)
        elif len(results) > 1:
            gather(results, self.ranks)


def share(found: Sequence[tuple[Any, list["Matrices"]]], ranks: Any) -> list[SharedMatrices]:
    """The matrices of steps, by who shares them: the ranks that have their rows, else all `ranks`, if there are any.

    A rank that has gathered the matrices of a step, as all do where these lie in a way that is not known, owns them.
    """
    kinds: dict[Any, list[Matrices]] = {}
    for step, some in found:
        owned = dtensor.sharded(step.blocks[0].weight)
        key = step.device, step.row_group or (None if owned else ranks), step.row_group is not None
        kinds.setdefault(key, []).extend(some)
    return [SharedMatrices(some, group, by_rows) for (_, group, by_rows), some in kinds.items()]


def shares(found: Sequence["Matrices"], world: int) -> list[list["Matrices"]]:
    """The layers of each batch that each rank owns."""
    edges = owners(tuple((len(m.blocks), cost_of(m)) for m in found), world)
    each = [*zip(found, edges, strict=True)]
    return [[part(m, *at[r : r + 2]) for m, at in each if at[r] < at[r + 1]] for r in range(world)]


def part(layers: "Matrices", begin: int, end: int) -> "Matrices":
    """Some of the layers that are alike, whose tensors are views."""
    x, scale = (
        None if t is None else t[(each := len(t) // len(layers.blocks)) * begin : each * end]
        for t in (layers.x, layers.scale)
    )
    assert x is not None
    return layers._replace(blocks=layers.blocks[begin:end], x=x, scale=scale)


def cost_of(layers: "Matrices") -> int:
    """What the products of one of the layers cost."""
    block = layers.blocks[0]
    return int(block.groups * cost(block.units // block.groups, layers.x.shape[-1]))


def cost(rows: int, columns: int) -> int:
    """What the products of a matrix cost."""
    return min(rows, columns) ** 2 * max(rows, columns)


@cache
def owners(batches: tuple[tuple[int, int], ...], world: int) -> tuple[tuple[int, ...], ...]:
    """Where the matrices of each rank begin in each batch, and where the last ones end: the same on all ranks.

    Batches are (number of matrices, cost of one). The most expensive matrices come first, and each goes to the rank
    that has the least to do by then.

    >>> owners(((3, 8), (2, 1)), 2)
    ((0, 2, 3), (0, 0, 2))
    """
    load, counts = [(0, rank) for rank in range(world)], [[0] * world for _ in batches]
    for k in sorted(range(len(batches)), key=lambda k: -batches[k][1]):
        number, each = batches[k]
        for _ in range(number):
            least, rank = load[0]
            heapreplace(load, (least + each, rank))
            counts[k][rank] += 1
    return tuple((0, *accumulate(some)) for some in counts)


# messages


def swap(send: Sequence[Sequence[Tensor]], receive: Sequence[Sequence[Tensor]], ranks: Any) -> None:
    """Send tensors to each rank, and fill those that each one sends, in one all-to-all."""
    device = next(t.device for some in (*send, *receive) for t in some)
    sizes, own_sizes = ([size_of(some) for some in each] for each in (receive, send))
    incoming, outgoing = (torch.empty(sum(some), dtype=torch.uint8, device=device) for some in (sizes, own_sizes))
    copy(views(torch.split_with_sizes(outgoing, own_sizes), send), send)
    dist.all_to_all_single(incoming, outgoing, sizes, own_sizes, group=ranks)
    copy(receive, views(torch.split_with_sizes(incoming, sizes), receive))


def gather(tensors: Sequence[Sequence[Tensor]], ranks: Any) -> None:
    """Fill the tensors of each rank, on all others, with what they are there, in one all-gather of equal messages."""
    rank, first = ranks.rank(), next(t for some in tensors for t in some)
    buffer = first.new_empty(len(tensors), max(map(size_of, tensors)), dtype=torch.uint8)
    copy(views([buffer[rank]], [tensors[rank]]), [tensors[rank]])
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # by version of torch
    all_gather(buffer.view(-1), buffer[rank], group=ranks)
    others = [r for r in range(len(tensors)) if r != rank]
    copy([tensors[r] for r in others], views([buffer[r] for r in others], [tensors[r] for r in others]))


def copy(targets: Sequence[Sequence[Tensor]], values: Sequence[Sequence[Tensor]]) -> None:
    """Copy tensors, list by list."""
    foreach.copy_([t for some in targets for t in some], [v for some in values for v in some])


def views(buffers: Sequence[Tensor], like: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Views of each buffer of bytes as tensors like those of a list."""
    found = []
    for buffer, some in zip(buffers, like, strict=True):
        ends = [0, *accumulate(map(aligned_size, some))]
        parts = (buffer[begin : begin + t.nbytes] for begin, t in zip(ends, some, strict=False))
        found.append([p.view(t.dtype).view(t.shape) for p, t in zip(parts, some, strict=True)])
    return found


def size_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of a message."""
    return sum(map(aligned_size, tensors))


def aligned_size(tensor: Tensor) -> int:
    """Bytes of a tensor in a message."""
    return aligned(tensor.nbytes)


def aligned(size: int) -> int:
    """The next multiple of ALIGNED."""
    return -(-size // ALIGNED) * ALIGNED


def bytes_sent(shapes: Sequence[tuple[int, int]], world: int, itemsize: int, by_rows: bool) -> dict[str, int]:
    """Bytes that a rank sends to others in a step, at most, for matrices of these shapes that are not in groups.

    `itemsize` is that of the products: 2 for bfloat16. The float32 means of lines go along with the steps.

    >>> bytes_sent([(64, 32)] * 4, world=2, itemsize=2, by_rows=False)
    {'directions': 0, 'steps': 8704}
    >>> bytes_sent([(64, 32)] * 4, world=2, itemsize=2, by_rows=True)
    {'directions': 4096, 'steps': 4608}
    """
    batches = Counter(shapes)
    cuts = owners(tuple((number, cost(*shape)) for shape, number in batches.items()), world)

    def rows(owner: int, rank: int) -> int:
        """What all rows, or those of one rank, take of the matrices of an owner."""
        of = [(b - a, *shape) for shape, (a, b) in zip(batches, (c[owner : owner + 2] for c in cuts), strict=True)]
        return sum(aligned(n * (dtensor.row_counts(r, world)[rank] if by_rows else r) * c * itemsize) for n, r, c in of)

    def lines(owner: int) -> int:
        each = zip(batches, cuts, strict=True)
        return sum((cut[owner + 1] - cut[owner]) * aligned(4 * max(shape)) for shape, cut in each)

    if not by_rows:
        return {"directions": 0, "steps": (world - 1) * max(rows(r, 0) + lines(r) for r in range(world))}
    pairs = [[(r, other) for other in range(world) if other != r] for r in range(world)]
    return {
        "directions": max(sum(rows(owner, r) for r, owner in some) for some in pairs),
        "steps": max(sum(rows(r, other) + lines(r) for r, other in some) for some in pairs),
    }
