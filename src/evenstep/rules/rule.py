"""What a rule is, and what it sees of a step. A rule turns gradients on v into directions.

To add one: a class here, used by an optimizer class.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import foreach
from ..coordinates.coordinates import Field, Schema
from ..math import guards
from ..math.change_of_variables import Scales, response
from ..parallel import dtensor


class OnV(NamedTuple):
    """Gradients or directions on v: a matrix [unit, column] of each block; a packed tensor for each of its biases."""

    weights: list[Tensor]
    biases: list[Tensor]


class Direction(NamedTuple):
    """A direction of descent on v; `scale`, if any, multiplies each unit's, bias included."""

    weights: list[Tensor]
    biases: list[Tensor]
    scale: Tensor | None = None


class Matrices(NamedTuple):
    """Layers that are alike as matrices [layer · group, unit, column], biases last; `x` may have zeros added behind.

    `scale` is how far each column moves weights, [layer · group, column] without biases (None: 1).
    """

    blocks: list[Any]
    x: Tensor
    scale: Tensor | None


class Rule:
    """A rule: its state, and the direction it makes of gradients on v."""

    linear = False  # linear in the gradient: feels β, and commutes with loss scaling
    own_rate = False  # whether directions have their stepsize and sign already
    external = False  # whether kernels may hand it the gradients on v, and take back its directions
    replays = False  # whether its work on a GPU can be recorded, and replayed in later steps
    matrices = False  # whether it turns the momentum of layers, as matrices, into steps
    narrow = False  # whether it multiplies those in bfloat16 on a GPU
    fused: Sequence[str] | None = None  # flags of the kernels that make its directions; None: torch operations do

    def joint(self, block: Any) -> bool:
        """Whether it sees a layer as one matrix, biases as columns."""
        return False

    def counted(self, block: Any) -> list[Tensor]:
        """The parameters whose steps the optimizer counts: checkpointers want some state for every parameter."""
        return list(block.parameters)

    def state(self, momentum: float) -> Schema:
        """The state it keeps."""
        return {"momentum_buffer": Field("parameter")} if momentum else {}

    def product_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype in which it multiplies matrices that come as `x`."""
        return torch.bfloat16 if self.narrow and x.is_cuda and x.dtype != torch.float64 else x.dtype

    def direct(self, steps: Sequence[Any], ok: Tensor | None, ranks: Any = None) -> None:
        """Set the direction of each `RuleStep`. All blocks of the rule come at once; `ok` masks a step not to take.

        `ranks` is the group of those that take the same step, if there are others.
        """
        for step in steps:
            step.direction = self.direction(step, None if ok is None else ok.to(step.device))

    def direction(self, step: "RuleStep", ok: Tensor | None) -> Direction:
        """The direction of the blocks of one step: the gradient, or its momentum where the groups ask for that."""
        return Direction(*heavy_ball(step, step.on_v, ok))


class GradientRule(Rule):
    """The gradient itself; with momentum, its heavy ball, which is what every rule begins with."""

    linear = True
    fused = ()


class RuleStep:
    """The step of some blocks, as a rule sees it. What belongs to units is packed: one flat tensor for all blocks."""

    group: dict[str, Any]  # whose settings all blocks share; stepsizes and weight decay aside
    direction: Direction

    def __init__(self, blocks: Sequence[Any], state: Any, dtype: torch.dtype) -> None:
        """Blocks of one device, dtype and rule, with equally many biases; `state` is the optimizer's."""
        first = blocks[0]
        self.blocks, self.state, self.group, self.rule = list(blocks), state, first.group, first.rule
        self.device, self.dtype = first.weight.device, dtype
        self.one = torch.ones((), dtype=dtype, device=self.device)
        self.parameters = [b.weight for b in blocks]
        self.parameters += [bias for each in zip(*(b.biases for b in blocks), strict=True) for bias in each]
        self.local_shapes = [first.local(p).shape for p in self.parameters]
        sizes = [b.matrix(b.local(b.weight)).shape[0] for b in blocks]
        # the units of each block on this rank; reductions are over all ranks
        self.units = dtensor.segments(sizes, first.weight, first.has_rows)
        # the groups of ranks over which single units are split
        self.split_units = dtensor.groups_along(first.weight, rows=False)
        self.split_units += [] if first.has_rows else dtensor.groups_along(first.weight, rows=True)
        self.row_group = dtensor.row_group(first.weight)
        self.gathers = dtensor.sharded(first.weight) and self.row_group is None  # matrices, as far as rules want those
        self.on_v, self.scales = OnV([], []), list[Scales]()
        self.owned = False  # whether nothing else has the memory of `on_v`
        self.square: Tensor | None = None  # of each unit's gradient on v, once it is known in this step
        self.length2: Tensor | None = None  # of each unit, likewise

    def live(self, name: str) -> list[Tensor]:
        """A field of each block's weight, as this rank has it."""
        return [b.local(self.state[b.weight][name]) for b in self.blocks]

    def read(self, name: str) -> Tensor:
        """A field of the blocks' state, packed."""
        return self.wide([pack(self.live(name))])[0]

    def write(self, values: Mapping[str, Tensor], ok: Tensor | None) -> None:
        """Write packed fields back, unless the mask `ok` says that the step does not count."""
        old: list[Tensor] = []  # compilers cannot call list[Tensor]
        new: list[Tensor] = []
        for name, value in values.items():
            live = self.live(name)
            old += live
            new += unpack(value if ok is None else torch.where(ok, value, self.read(name)), live)
        foreach.copy_(old, new)

    def buffers(self, name: str) -> list[Tensor]:
        """A field per parameter of all blocks, as this rank has it: weights, then biases."""
        return [self.blocks[0].local(self.state[p][name]) for p in self.parameters]

    def as_parameters(self, on_v: OnV) -> list[Tensor]:
        """Tensors on v in the shapes of the parameters: weights, then biases."""
        found = [b.unmatrix(w) for b, w in zip(self.blocks, on_v.weights, strict=True)]
        biases = [bias for packed in on_v.biases for bias in torch.split_with_sizes(packed, self.units.sizes)]
        return found + shaped(biases, self.local_shapes[len(found) :])

    def as_blocks(self, tensors: Sequence[Tensor]) -> OnV:
        """The inverse of `as_parameters`."""
        count = len(self.blocks)
        weights = [b.matrix(t) for b, t in zip(self.blocks, tensors[:count], strict=True)]
        return OnV(weights, [pack(tensors[k : k + count]) for k in range(count, len(tensors), count)])

    def rows(self, flat: Tensor) -> Sequence[Tensor]:
        """A number per unit as [unit, 1] of each block, which broadcasts to its matrix."""
        return torch.split_with_sizes(flat.unsqueeze(1), self.units.sizes)

    def unit_square(self) -> Tensor:
        """Σ of squares of the gradient on v over each unit, its bias included."""
        if self.square is None:
            weights, biases = self.on_v
            square = pack([torch.linalg.vector_norm(w, dim=1) for w in weights]).square()
            for bias in biases:
                square = torch.addcmul(square, bias, bias)
            self.square = self.whole_units(square)
        return self.square

    def unit_length2(self) -> Tensor:
        """‖u_j‖² of each unit, parts that do not train included; the shortest where a weight serves several biases."""
        if self.length2 is None:
            weights, biases = zip(*(block.whole() for block in self.blocks), strict=True)
            pairs = list(zip(self.wide(weights), self.scales, strict=True))
            rows = [pack(self.wide(column)) for column in zip(*biases, strict=True)]
            level = None if not rows else rows[0] if len(rows) == 1 else torch.stack(rows)
            if self.scales[0].mu is not None:
                mean = pack([response(w, c.mu) for w, c in pairs if c.mu is not None])
                level = mean if level is None else level + mean
            stretch = pack([guards.stretch(w, c.spread) for w, c in pairs])
            self.length2 = self.whole_units(guards.squared_length(stretch, level))
        return self.length2

    def wide(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors in the dtype that the step is computed in."""
        return [t if t.dtype == self.dtype else t.to(self.dtype) for t in tensors]

    def whole_units(self, sums: Tensor) -> Tensor:
        """Sums over units, added up over all ranks where a unit is split."""
        return dtensor.reduced(sums, self.split_units) if self.split_units else sums

    # for rules of matrices

    def column_scales(self) -> Sequence[Tensor | None]:
        """How far each column of the blocks' matrices moves weights, [group, column] without biases (None: 1)."""
        return [None] * len(self.blocks)

    def constant_sizes(self) -> Tensor:
        """How large the constant input is, whose weight is the bias, one number per block."""
        return self.one.expand(len(self.blocks))

    def shrink(self, factors: Sequence[Tensor]) -> None:
        """Multiply the weights of each block by a factor per group."""
        shrink([*zip(self.blocks, factors, strict=True)])

    def matrices(self, ok: Tensor | None) -> list[Matrices]:
        """Nesterov's direction of the momentum on v, (1 − m) g + m M with M ← m M + (1 − m) g, for `take_matrices`.

        Those of a `row_group` are [layer, row, column], the rows that this rank has.
        """
        momentum, buffers = self.group["momentum"], self.live("momentum_buffer")
        grads = [gradient_of(q).to(buffer.dtype) for (q,), buffer in zip(self.stand_ins(ok), buffers, strict=True)]
        means = torch._foreach_lerp(buffers, grads, 1 - momentum)
        put(buffers, means, ok)
        alike: dict[Any, list[int]] = {}
        ahead, scales = list(torch._foreach_lerp(grads, means, momentum)), self.column_scales()
        for k, (block, x) in enumerate(zip(self.blocks, ahead, strict=True)):
            ahead[k] = x = dtensor.gathered(block.weight, x) if self.gathers else x
            alike.setdefault((block.groups, block.units, x.shape[1], scales[k] is None), []).append(k)
        found = []
        for (groups, _, columns, plain), few in alike.items():
            x = torch.stack([ahead[k] for k in few])
            x = x.to(self.rule.product_dtype(x))
            x = x if self.row_group is not None else x.view(len(few) * groups, -1, columns)
            scale = None if plain else torch.cat([scale for k in few if (scale := scales[k]) is not None])
            found.append(Matrices([self.blocks[k] for k in few], x, scale))
        return found

    def take_matrices(self, found: Sequence[Matrices]) -> None:
        """Take the steps that a rule has written into the matrices for the direction."""
        layers = [(b, x) for m in found for b, x in zip(m.blocks, m.x.chunk(len(m.blocks)), strict=True)]
        steps = {id(block): x.flatten(0, 1) for block, x in layers}
        own = [(block, steps[id(block)]) for block in self.blocks]
        self.take([[dtensor.part(s, b.weight) if self.gathers else s] for b, s in own])

    # for rules that move parameters, as torch's do

    def stand_ins(self, ok: Tensor | None) -> list[list[nn.Parameter]]:
        """For each block parameters that are zero and have its gradients on v: zeros, if the mask `ok` says no."""
        (weights, packed), found = self.on_v, []
        self.on_v = OnV([], [])  # as large as the model: each gradient goes when its stand-in has it
        biases = [torch.split_with_sizes(each, self.units.sizes) for each in packed]
        for k, block in enumerate(self.blocks):
            weight, weights[k] = weights[k], self.one
            own = [of_blocks[k] for of_blocks in biases]
            if self.rule.joint(block):
                grads = [torch.cat([weight, torch.stack(own, 1)], dim=1) if own else weight]
            else:
                grads = [block.unmatrix(weight), *shaped(own, [block.local(b).shape for b in block.biases])]
            grads = [g.to(block.weight.dtype).contiguous() for g in grads]
            found.append([stand_in(g if ok is None else torch.where(ok.to(g.device), g, 0)) for g in grads])
        return found

    def take(self, steps: list[list[Tensor]]) -> None:
        """Take what a rule has made of the stand-ins for the direction."""
        weights, biases = [], []
        for block, few in zip(self.blocks, steps, strict=True):
            weight, *rows = self.wide(few)
            if self.rule.joint(block) and block.biases:
                weight, columns = weight.tensor_split([-len(block.biases)], 1)
                rows = list(columns.unbind(1))
            weights.append(weight if self.rule.joint(block) else block.matrix(weight))
            biases.append([row.reshape(-1) for row in rows])
        self.direction = Direction(weights, [pack(column) for column in zip(*biases, strict=True)])


def shrink(pairs: Sequence[tuple[Any, Tensor]]) -> None:
    """Multiply the weights of blocks by factors, one per group."""
    weights, each = [], []
    for block, factor in pairs:
        for b in block.biases:
            weights.append(dtensor.local(b).detach())
            each.append(factor[block.group_of_rows()].view(weights[-1].shape))
        weights.append(dtensor.local(block.weight).detach())
        if block.groups > 1:  # one for each row of the matrix, in the layout of the weight
            rows = factor[block.group_of_rows()]
            factor = block.unmatrix(rows[:, None].expand(block.matrix(weights[-1]).shape))
        each.append(factor)
    if weights:
        torch._foreach_mul_(weights, each)


def heavy_ball(step: RuleStep, on_v: OnV, ok: Tensor | None) -> OnV:
    """The momentum buffers after one more value, in torch's convention, to be read only; the value without momentum."""
    momentum = step.group["momentum"]
    if not momentum:
        return on_v
    buffers = step.buffers("momentum_buffer")
    values = step.as_parameters(on_v)
    if ok is None and all(b.dtype == v.dtype for b, v in zip(buffers, values, strict=True)):
        torch._foreach_mul_(buffers, momentum)
        return step.as_blocks(foreach.add_(buffers, values))
    news = foreach.add(values, buffers, alpha=momentum)
    put(buffers, news, ok)
    return step.as_blocks(news)


def put(old: Sequence[Tensor], new: Sequence[Tensor], ok: Tensor | None) -> None:
    """Write `new` over `old` in place, unless the mask `ok` says that the step does not count."""
    new = shaped(new, [o.shape for o in old])
    foreach.copy_(old, new if ok is None else [torch.where(ok, n, o) for n, o in zip(new, old, strict=True)])


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors flat, one after another."""
    if tensors[0].dim() == 0:
        return torch.stack(list(tensors))
    flat = [t if t.dim() == 1 else t.reshape(-1) for t in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def unpack(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inverse of `pack`, of tensors like these."""
    if like[0].dim() == 0:
        return flat.unbind()
    return torch.split_with_sizes(flat, [t.numel() for t in like])


def shaped(tensors: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Tensors in these shapes."""
    return [t if t.shape == shape else t.view(shape) for t, shape in zip(tensors, shapes, strict=True)]


def stand_in(grad: Tensor) -> nn.Parameter:
    """A parameter that is zero and has this gradient."""
    q = nn.Parameter(torch.zeros_like(grad))
    q.grad = grad
    return q


def gradient_of(q: nn.Parameter) -> Tensor:
    """The gradient of a stand-in."""
    assert q.grad is not None
    return q.grad


def plain_share(group: dict[str, Any]) -> float:
    """Share of their group's lr that parameters outside layers take: `plain_lr` over the lr it was given with.

    A ratio, so that schedules of lr move both.

    >>> [plain_share({"plain_lr": lr, "plain_at": 2.0}) for lr in (0.5, None, 0.0)]
    [0.25, 1.0, 0.0]
    >>> plain_share({"plain_lr": 0.5, "plain_at": 0.0}), plain_share({})  # no ratio; a rule without plain_lr
    (1.0, 1.0)
    """
    plain_lr, at = group.get("plain_lr"), group.get("plain_at")
    if plain_lr is None or (plain_lr and not at):
        return 1.0
    return float(plain_lr / at) if at else 0.0
