"""The step for many blocks at once, in a number of launches that does not grow with the network.

The arithmetic is that of the block-by-block loop in `shell`, which stays as its reference. What belongs to inputs lies
end to end in one tensor, what belongs to units in another; weights are read twice, by `kernels.rows` on a GPU (sums over
each row, then the motion), and by a few operations per block elsewhere.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import rows, stepsize, update
from .blocks import Block
from .constants import geometry_beta2
from .hooks import Stage
from .kernels import rows as rows_kernel
from .moments import Running, Sums, accumulation_dtype, fold_mean, gain
from .motion import gradient, rates
from .segments import Segments

State = dict[str, Any]


def fits(block: Block, stage: Stage | None) -> bool:
    """Whether a block can move together with others: plain tensors, units as rows in memory, at most one bias."""
    weight, group = block.weight, block.group
    if group["foreach"] is False or not rows_serve(weight, group["capturable"]):
        return False
    if block.alone or len(block.biases) > 1 or block.treatment == "canonical" or (stage is not None and stage.stuffed):
        return False
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in block.parameters) or not weight.numel():
        return False
    if any(b is not None and b.dtype != weight.dtype for b in frozen_bias(block)) or any(
        b.dtype != weight.dtype for b in block.biases
    ):
        return False
    return inner(block) is not None


def rows_serve(weight: Tensor, capturable: bool) -> bool:
    """Whether rows of such a weight can be read twice: on the CPU, or by the kernels."""
    if torch.compiler.is_compiling():
        return False
    if weight.device.type == "cpu":
        return not capturable and weight.dtype == accumulation_dtype(weight.dtype)
    return rows_kernel.serves(weight)


def arrange(
    candidates: Sequence[tuple[Block, Stage | None]], blocks: Sequence[Block]
) -> tuple[list["Layout"], list[Block]]:
    """Layouts for those of the candidates that can move together, and what is left of `blocks`."""
    found: dict[Any, list[tuple[Block, Stage | None]]] = {}
    for block, stage in candidates:
        if fits(block, stage):
            key = block.weight.device, block.weight.dtype, block.group["momentum"]
            found.setdefault(key, []).append((block, stage))
    layouts = [Layout([b for b, _ in some], [s for _, s in some]) for some in found.values()]
    taken = {id(block) for some in found.values() for block, _ in some}
    return layouts, [block for block in blocks if id(block) not in taken]


def frozen_bias(block: Block) -> list[Tensor]:
    """A bias of the layer that does not train with it, but is part of its units' length."""
    return [] if block.entry is None or block.biases else [b for b in block.entry.biases if b is not None]


def inner(block: Block) -> int | None:
    """How the weight lies in memory: the distance between two inputs of a row; None if units are not rows."""
    m = block.matrix(block.weight)
    if m.data_ptr() != block.weight.data_ptr():
        return None
    return m.shape[3] if m.is_contiguous() else 1 if m.transpose(2, 3).is_contiguous() else None


def as_rows(block: Block, tensor: Tensor, inner: int) -> Tensor:
    """A tensor like the weight as [group, unit, column], columns in the weight's order in memory."""
    m = block.matrix(tensor)
    m = m if inner == m.shape[3] else m.transpose(2, 3)
    return m.reshape(*m.shape[:2], -1)


class Layout:
    """Where the blocks' units and inputs lie; made once for a set of blocks."""

    def __init__(self, blocks: Sequence[Block], stages: Sequence[Stage | None]) -> None:
        """All on one device and in one dtype."""
        self.blocks, self.stages = list(blocks), list(stages)
        weight = blocks[0].weight
        self.device, self.dtype = weight.device, accumulation_dtype(weight.dtype)
        self.inner = [int(inner(b) or 1) for b in blocks]
        shapes = [b.matrix(b.weight).shape for b in blocks]
        self.shapes = shapes
        self.sizes = [s[:2].numel() for s in shapes]
        self.units = Segments.of(self.sizes, self.device)
        self.moving = [
            k for k, (b, s) in enumerate(zip(blocks, stages, strict=True)) if s and b.treatment == "whitened"
        ]
        self.shared = [k for k, (b, s) in enumerate(zip(blocks, stages, strict=True)) if s and b.treatment != "plain"]
        self.guarded = [k for k, s in enumerate(stages) if s is not None]
        self.biased = [k for k, b in enumerate(blocks) if b.biases]
        self.levels = [(b.biases or frozen_bias(b) or [None])[0] for b in blocks]
        self.bias_sizes = [self.sizes[k] for k in self.biased]
        # an input that no layer has ends the list: it stands for all inputs of blocks without moments
        self.input_sizes = [shapes[k][0] * shapes[k][2] for k in self.moving]
        self.inputs = Segments.of([*self.input_sizes, 1], self.device)
        self.base = dict(zip(self.moving, Segments.of([*self.input_sizes, 1]).offsets.tolist(), strict=False))
        self.identity = sum(self.input_sizes)
        self.unbiased = [k for k in self.moving if not blocks[k].biases]
        self._groups()
        self.fan_in = self.tensor([blocks[k].fan_in for k in self.shared])
        self.unit_of_bias = self._rows_of(self.biased)
        self.alone = torch.zeros(2, 1, dtype=self.dtype, device=self.device)

    def tensor(self, values: Sequence[float]) -> Tensor:
        """Numbers as a tensor of this layout."""
        return torch.tensor(values, dtype=self.dtype).to(self.device, non_blocking=True)

    def _rows_of(self, blocks: list[int]) -> Tensor | None:
        """The units of some blocks, as an index into all; None for all of them."""
        if len(blocks) == len(self.blocks):
            return None
        starts = Segments.of(self.sizes).offsets.tolist()
        found = [torch.arange(starts[k], starts[k] + self.sizes[k]) for k in blocks]
        return torch.cat([*found, torch.arange(0)]).to(self.device)

    def _groups(self) -> None:
        sizes, kernel, unbiased, owner, count = [], [], [], [], 0
        for k, (groups, units, inputs, area) in enumerate(self.shapes):
            if k in self.base:
                sizes += [inputs] * groups
                kernel += [area] * groups
                unbiased += [k in self.unbiased] * groups
                owner.append(torch.arange(count, count + groups).repeat_interleave(units))
                count += groups
            else:
                owner.append(torch.full((groups * units,), -1))
        group = torch.cat(owner)
        self.groups = Segments.of([*sizes, 1], self.device)
        self.group_of_unit = torch.where(group < 0, count, group).to(self.device)
        self.kernel = self.tensor([*kernel, 0])
        self.group_unbiased = torch.tensor([*unbiased, False]).to(self.device)

    def columns(self) -> Tensor:
        """For each column of each group of the moving blocks, end to end, which input it is."""
        if not hasattr(self, "_columns"):
            found = []
            for k in self.moving:
                groups, _, inputs, area = self.shapes[k]
                column = torch.arange(inputs * area)
                one = (column // self.inner[k]) % inputs
                found.append((self.base[k] + torch.arange(groups)[:, None] * inputs + one).flatten())
            self._columns = torch.cat([*found, torch.arange(0)]).to(self.device)
            self._column_sizes = [self.shapes[k][0] * self.shapes[k][2] * self.shapes[k][3] for k in self.moving]
        return self._columns

    def by_column(self, *vectors: Tensor) -> list[list[Tensor]]:
        """Vectors over the inputs as [group, 1, column] of each moving block."""
        wide = torch.stack(vectors).index_select(1, self.columns()).unbind()
        shapes = [(self.shapes[k][0], 1, -1) for k in self.moving]
        return [[c.view(s) for c, s in zip(w.split(self._column_sizes), shapes, strict=True)] for w in wide]


class Coordinates:
    """The coordinates of all moving blocks in one step, and their moments after it."""

    def __init__(self, layout: Layout, states: Sequence[State], linear: bool) -> None:
        """From the states of the blocks' weights and what their stages hold."""
        self.layout, self.states = layout, states
        lay, mine = layout, [states[k] for k in layout.moving]
        stages = [s for k in lay.moving if (s := lay.stages[k]) is not None]
        self.mine, self.mine_stages = mine, stages
        groups = [lay.blocks[k].group for k in lay.moving]
        taus = [torch.inf if g["fresh_max"] is None else g["fresh_max"] for g in groups]
        one = lay.alone
        first, second = (
            torch.cat([s.slots for s in stages], -1).sum(0).unbind() if stages else lay.alone[:, :0].unbind()
        )
        first, second = torch.cat([torch.stack([first, second]), one], 1).unbind()
        self.centre = torch.cat([*(s.centre for s in stages), one[0]])
        self.mx = torch.cat([*(s["mx"] for s in mine), one[0]])
        self.vx = torch.cat([*(s["vx"] for s in mine), one[0]])
        self.mass = torch.stack([*(s["mass"] for s in mine), one[0, 0]])
        counted = torch.stack([*(s.rows for s in stages), one[0, 0]])
        settings = remembered(
            lay,
            "moving",
            [[*(g["damping"] for g in groups), 0.0], [*taus, torch.inf], [*(g["decay"] for g in groups), 0.0]],
        )
        per_layer = torch.stack([counted, self.mass, *settings.unbind()], 1)
        number, mass, damping, tau, self.decay = lay.inputs.widen(per_layer).unbind(1)
        self.running = Running(self.mx, self.vx, mass)
        self.sums = Sums(number, first, second)
        self.decay_of_layer = settings[2]
        self.frame = update.moving_frame(
            self.running, self.sums, self.centre, mass, damping=damping, fresh_max=tau, over=lay.inputs
        )
        self.mu, self.alpha = self.frame.constants.mu, self.frame.constants.alpha2.sqrt()
        self.beta = self._beta(linear)

    def _beta(self, linear: bool) -> Tensor | None:
        """β of each block; None where it is 1 for all. Also S of this step."""
        lay = self.layout
        self.sharing = None
        if not lay.shared:
            return None
        stages = [s for k in lay.shared if (s := lay.stages[k]) is not None]
        tally = torch.stack([s.tally for s in stages])
        old = torch.stack([self.states[k]["sharing"] for k in lay.shared])
        applied, examples = tally[:, 2], tally[:, 3]
        self.sharing = torch.where(applied > 0, applied / examples.clamp(min=1), old)
        declared = [lay.blocks[k].group.get("sharing") for k in lay.shared]
        if any(d is not None for d in declared):
            fixed = remembered(lay, "sharing", [[torch.nan if d is None else d for d in declared]])[0]
            self.sharing = torch.where(fixed.isnan(), self.sharing, fixed)
        if not linear:
            return None
        beta = geometry_beta2(lay.fan_in, self.sharing).sqrt()
        return torch.ones(len(lay.blocks), dtype=lay.dtype, device=lay.device).index_copy(0, index(lay, "shared"), beta)

    def commit(self, ok: Tensor | None) -> None:
        """Let the batches join the running moments, and the next ones be summed about them."""
        lay = self.layout
        after = update.moments_after(self.running, self.sums, self.centre, decay=self.decay, over=lay.inputs)
        first = lay.inputs.offsets[:-1]
        mass = after.mass.index_select(0, first)
        mx, vx = after.mx, after.vx
        if ok is not None:
            mx, vx, mass = (torch.where(ok, new, old) for new, old in ((mx, self.mx), (vx, self.vx), (mass, self.mass)))
        centre = torch.where(lay.inputs.widen(mass) > 0, mx, torch.nan)
        for name, value in (("mx", mx), ("vx", vx)):
            put_all([s[name] for s in self.mine], value[: lay.identity].split(lay.input_sizes))
        put_all([s.centre for s in self.mine_stages], centre[: lay.identity].split(lay.input_sizes))
        put_all([s["mass"] for s in self.mine], mass.unbind())
        if self.sharing is not None:
            old = [self.states[k]["sharing"] for k in lay.shared]
            new = self.sharing if ok is None else torch.where(ok, self.sharing, torch.stack(old))
            put_all(old, new.unbind())


def put_all(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Write each new tensor over an old one, in one launch."""
    if old:
        torch._foreach_copy_(list(old), list(new)[: len(old)])


def remembered(layout: Layout, name: str, values: list[list[Any]]) -> Tensor:
    """Settings as a tensor, made again when they change; those that are tensors stay on the device."""
    flat = [v for row in values for v in row]
    if any(isinstance(v, Tensor) for v in flat):
        return torch.stack([as_scalar(v, layout) for v in flat]).view(len(values), -1)
    kept = layout.__dict__.setdefault("_settings", {})
    if name not in kept or kept[name][0] != values:
        kept[name] = values, layout.tensor(flat).view(len(values), -1)
    found: Tensor = kept[name][1]
    return found


def as_scalar(value: Any, layout: Layout) -> Tensor:
    """A number or one-element tensor as a 0-d tensor of the layout."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(layout.device, layout.dtype, non_blocking=True)
    return torch.full((), value, dtype=layout.dtype, device=layout.device)


def index(layout: Layout, name: str) -> Tensor:
    """A list of blocks as an index tensor."""
    kept = layout.__dict__.setdefault("_indices", {})
    if name not in kept:
        kept[name] = torch.tensor(getattr(layout, name), dtype=torch.int64).to(layout.device)
    found: Tensor = kept[name]
    return found


class PlainRows:
    """The two readings of the weights by torch operations, for a device whose answers the host may read."""

    def __init__(self, layout: Layout, coordinates: Coordinates, state: Any, momentum: float, ahead: bool) -> None:
        """The gradient on v of every row; `ahead` asks for Nesterov's direction."""
        self.layout, self.state, self.momentum, self.ahead = layout, state, momentum, ahead
        lay, c, beta = layout, coordinates, coordinates.beta
        self.coordinates = c
        scaled = c.alpha if beta is None else c.alpha * lay.inputs.widen(torch.cat([beta[lay.moving], lay.alone[0]]))
        u = c.alpha * c.mu
        self.unbiased = (
            rows.projection(c.mu, c.alpha, c.frame.fresh_spread, lay.kernel, lay.groups, lay.group_unbiased)
            if lay.unbiased
            else None
        )
        vectors = [scaled, u, c.mu, c.alpha, c.frame.spread, c.frame.fresh_spread]
        if self.unbiased is not None:
            self.unbiased = rows.Projection(*(x.index_select(0, lay.group_of_unit) for x in self.unbiased))
            vectors += [c.alpha * u, c.alpha * u * c.frame.fresh_spread]
        self.column = (
            [dict(zip(lay.moving, one, strict=True)) for one in lay.by_column(*vectors)] if lay.moving else [{}] * 8
        )
        self.bias_grad = self._bias_gradient(beta)
        self.on_v = self._on_v(beta)
        norms = torch.cat([torch.linalg.vector_norm(a, dim=-1).flatten() for a in self.on_v])
        self.square = norms * norms
        if lay.biased:
            self.square = self._at_biased(self.square, self.bias_grad * self.bias_grad)

    def _at_biased(self, to: Tensor, value: Tensor) -> Tensor:
        """Add a value for each unit with a bias."""
        where = self.layout.unit_of_bias
        return to + value if where is None else to.index_add(0, where, value)

    def _bias_gradient(self, beta: Tensor | None) -> Tensor:
        lay = self.layout
        if not lay.biased:
            return lay.alone[0, :0]
        grads = [gradient(lay.blocks[k].biases[0]) for k in lay.biased]
        signed = [-g if lay.blocks[k].group["maximize"] else g for k, g in zip(lay.biased, grads, strict=True)]
        found = torch.cat(signed)
        if beta is not None:
            wide = lay.units.widen(beta)
            found = found * (wide if lay.unit_of_bias is None else wide.index_select(0, lay.unit_of_bias))
        return found

    def _on_v(self, beta: Tensor | None) -> list[Tensor]:
        lay, found = self.layout, []
        scaled, u = self.column[:2]
        biases = dict(zip(lay.biased, self.bias_grad.split(lay.bias_sizes), strict=True))
        kappa = self.unbiased.kappa.split(lay.sizes) if self.unbiased is not None else ()
        for k, block in enumerate(lay.blocks):
            grad = as_rows(block, gradient(block.weight), lay.inner[k])
            if block.group["maximize"]:
                grad = -grad
            if k not in lay.base:
                found.append(grad if beta is None else grad * beta[k])
                continue
            grad = grad * scaled[k]
            if k in biases:
                shift = biases[k].view(*grad.shape[:2], 1)
            else:
                shift = torch.matmul(grad, u[k].mT) * kappa[k].view(*grad.shape[:2], 1)
            found.append(grad.addcmul_(shift, u[k], value=-1))
        return found

    def sums(self, guarded: bool) -> rows.RowSums:
        """Let the gradients join the momentum, and add up the rows."""
        lay, c = self.layout, self.coordinates
        bias = self._directions()
        _, _, mu, alpha, spread, fresh, *bends = self.column
        along, stretch, bend, level, length2 = [], [], [], [], []
        zeros = torch.zeros(max(lay.sizes), dtype=lay.dtype, device=lay.device)
        for k, block in enumerate(lay.blocks):
            moves, none = k in lay.base, zeros[: lay.sizes[k]]
            if moves:
                self.steps[k] = step = self.steps[k] * alpha[k]
            along.append(torch.matmul(step, mu[k].mT).flatten() if moves else none)
            if not guarded or lay.stages[k] is None:
                for part in (stretch, bend, level, length2):
                    part.append(none)
                continue
            weight, step = as_rows(block, block.weight, lay.inner[k]), self.steps[k]
            stretch.append(
                torch.matmul(step * step, fresh[k].mT).flatten() if moves else (step * step).sum(-1).flatten()
            )
            length2.append(
                torch.matmul(weight * weight, spread[k].mT).flatten() if moves else (weight * weight).sum(-1).flatten()
            )
            mean = torch.matmul(weight, mu[k].mT).flatten() if moves else none
            at = lay.levels[k]
            level.append(mean if at is None else mean + at)
            bend.append(torch.matmul(step, bends[1][k].mT).flatten() if k in lay.unbiased else none)
        full = torch.zeros(sum(lay.sizes), dtype=lay.dtype, device=lay.device)
        bias = self._at_biased(full, bias) if lay.biased else full
        return rows.RowSums(self.square, *(torch.cat(part) for part in (along, stretch, bend, level, length2)), bias)

    def _directions(self) -> Tensor:
        """Set `steps`, the direction on v of every row; the direction of every bias."""
        lay, m = self.layout, self.momentum
        self.steps, bias = list(self.on_v), self.bias_grad
        if not m:
            return bias
        buffers = [as_rows(b, momentum_of(self.state, b.weight), i) for b, i in zip(lay.blocks, lay.inner, strict=True)]
        biases = [momentum_of(self.state, lay.blocks[k].biases[0]) for k in lay.biased]
        torch._foreach_mul_([*buffers, *biases], m)
        torch._foreach_add_([*buffers, *biases], [*self.on_v, *self.bias_grad.split(lay.bias_sizes)])
        held = torch.cat(biases) if biases else bias
        if not self.ahead:
            self.steps = buffers
            return held
        self.steps = list(torch._foreach_add(self.on_v, buffers, alpha=m))
        return bias + m * held

    def move(self, motion: rows.Motion) -> None:
        """Move weights and biases."""
        lay = self.layout
        gains, backs = motion.gain.split(lay.sizes), motion.back.split(lay.sizes)
        for k, block in enumerate(lay.blocks):
            rate, *_ = rates(block)
            weight, step, shape = (
                as_rows(block, block.weight, lay.inner[k]),
                self.steps[k],
                (*self.steps[k].shape[:2], 1),
            )
            if k in lay.unbiased:
                step = step.addcmul_(backs[k].view(shape), self.column[6][k], value=-1)
            shrink(block.weight, rate, block.group)
            weight.addcmul_(step, gains[k].view(shape))
        if lay.biased:
            found = motion.bias if lay.unit_of_bias is None else motion.bias.index_select(0, lay.unit_of_bias)
            for k, step in zip(lay.biased, found.split(lay.bias_sizes), strict=True):
                block = lay.blocks[k]
                shrink(block.biases[0], rates(block)[1], block.bias_groups[0])
                block.biases[0].add_(step)


def momentum_of(state: Any, p: Tensor) -> Tensor:
    """The momentum buffer of `p`, laid out in memory as `p` is."""
    buffer: Tensor = state[p]["momentum_buffer"]
    if buffer.stride() != p.stride():
        buffer = state[p]["momentum_buffer"] = torch.empty_like(p).copy_(buffer)
    return buffer


def shrink(p: Tensor, rate: Any, group: dict[str, Any]) -> None:
    """Decoupled weight decay."""
    if group["weight_decay"]:
        p.mul_(1 - rate * group["weight_decay"])


class Together:
    """One step of many blocks: look first, then move if all that was seen is finite."""

    def __init__(self, layout: Layout, state: Any, *, linear: bool, even: bool) -> None:
        """`even` is `EvenStep`'s rule; otherwise stochastic gradient with momentum."""
        self.layout, self.state, self.linear, self.even = layout, state, linear, even
        states = [state[b.weight] for b in layout.blocks]
        self.states, group = states, layout.blocks[0].group
        self.coordinates = Coordinates(layout, states, linear)
        make: Callable[..., Any] = rows_kernel.TritonRows if layout.device.type == "cuda" else PlainRows
        self.rows = make(layout, self.coordinates, state, group["momentum"], even)

    def finite(self) -> Tensor:
        """Whether all gradients are finite."""
        return torch.isfinite(self.rows.square).all()

    def move(self, ok: Tensor | None, floor: float) -> None:
        """Make the step, unless the mask `ok` says no, and let the batches join the moments."""
        lay, c = self.layout, self.coordinates
        groups = [b.group for b in lay.blocks]
        guarded = any(g["trust"] is not None for g in groups) and bool(lay.guarded)
        sums = self.rows.sums(guarded)
        both = [rates(b) for b in lay.blocks]
        radii = [
            torch.inf if s is None or g["trust"] is None else g["trust"]
            for s, g in zip(lay.stages, groups, strict=True)
        ]
        columns = [[r[0] for r in both], [r[1] if len(r) > 1 else 0.0 for r in both], radii]
        settings = remembered(lay, "units", columns).unbind()
        per_layer = [*settings, *([] if c.beta is None else [c.beta])]
        rate, bias_rate, radius, *beta = lay.units.widen(torch.stack(per_layer, 1)).unbind(1)
        scale = beta[0] if beta else torch.ones_like(rate)
        if self.even:
            scale = scale * self._even(sums.square, ok)
        motion = rows.motion(
            sums,
            self.rows.unbiased,
            scale=scale,
            rate=rate,
            bias_rate=bias_rate,
            radius=radius if guarded else None,
            floor=floor,
            crowd=None if self.linear else lay.units,
        )
        self.rows.move(motion) if ok is None else self.rows.move(motion, ok)
        self._count(motion, guarded)

    def _even(self, square: Tensor, ok: Tensor | None) -> Tensor:
        """Eq. 11 per unit: one over the root of its running mean square, damped."""
        lay, groups = self.layout, [b.group for b in self.layout.blocks]
        old = torch.cat([s["square"] for s in self.states])
        mass = torch.stack([s["square_mass"] for s in self.states])
        dampings = [0.0 if b.entry is None else b.group["damping"] for b in lay.blocks]
        decay, eps, damping = remembered(
            lay, "even", [[g["decay"] for g in groups], [g["eps"] for g in groups], dampings]
        ).unbind()
        mass_u, decay_u, eps_u, damping_u = lay.units.widen(torch.stack([mass, decay, eps, damping], 1)).unbind(1)
        average, after = fold_mean(old, square, mass_u, decay_u), gain(mass, decay)[1]
        if ok is not None:
            average, after = torch.where(ok, average, old), torch.where(ok, after, mass)
        put_all([s["square"] for s in self.states], average.split(lay.sizes))
        put_all([s["square_mass"] for s in self.states], after.unbind())
        level = stepsize.unit_level(average, square, damping_u, lay.units)
        return stepsize.normalized(torch.full_like(level, 1 - groups[0]["momentum"]), level, eps_u)

    def _count(self, motion: rows.Motion, guarded: bool) -> None:
        """What the guards did, for `fired` and monitors."""
        lay, raised = self.layout, self.coordinates.frame.raised
        if not lay.guarded or not (guarded or any(b.group.get("fresh_max") is not None for b in lay.blocks)):
            return
        held = lay.units.total(motion.held)
        largest = torch.segment_reduce(motion.relative2, "max", offsets=lay.units.offsets, unsafe=True).sqrt()
        inputs = torch.zeros_like(held)
        if lay.moving:
            inputs = inputs.index_copy(0, index(lay, "moving"), raised[:-1])
        table = torch.stack([inputs, held, largest], 1).float()
        counted = torch.stack([inputs, held, torch.ones_like(held)], 1).float()
        stages = [s for k in lay.guarded if (s := lay.stages[k]) is not None]
        put_all([s.last for s in stages], [table[k] for k in lay.guarded])
        torch._foreach_add_([s.fired for s in stages], [counted[k] for k in lay.guarded])
