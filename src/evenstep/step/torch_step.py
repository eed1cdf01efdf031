"""The step of many blocks in torch operations: the reference, and the way on every device without Triton.

What belongs to inputs, units or layers is packed into flat tensors, one block after another; only what is as large as
the weights is done block by block.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import foreach
from ..coordinates.coordinates import Batch, Layers, Scales, Statistics
from ..math import change_of_variables, guards
from ..math.change_of_variables import mean_response, per_unit
from ..math.moments import Sums, accumulation_dtype
from ..math.segments import Segments
from ..parallel import dtensor
from ..rules.rule import Direction, OnV, put
from ..rules.torch_rule import joined, parted, proxy_of
from ..statistics.batch import LayerStatistics, recentre
from .block import Block
from .gradients import all_finite, gradient
from .state import schema_of


class InputScales(NamedTuple):
    """Whitened coordinates of one block: μ and α as [group, input], β as [group, unit] or one number."""

    mu: Tensor
    alpha: Tensor
    beta: Tensor
    spread: Tensor
    fresh: Tensor


class BlockScales(NamedTuple):
    """Coordinates of one block: β alone where μ = 0 and α = 1 (None: 1)."""

    inputs: InputScales | None
    beta: Tensor | None


class TorchStep:
    """The step of blocks that share device, dtype, coordinates, rule and settings, and have equally many biases."""

    def __init__(self, blocks: Sequence[Block], stages: Sequence[LayerStatistics | None], state: Any) -> None:
        """Either all of `stages` or none is None."""
        first = blocks[0]
        self.blocks, self.stages, self.state = list(blocks), [s for s in stages if s is not None], state
        self.group, self.coordinates, self.rule = first.group, first.coordinates, first.rule
        self.device, self.dtype = first.weight.device, widest(blocks, self.stages, state)
        self.all_seen, self.needs_direction = True, True
        self.one = torch.ones((), dtype=self.dtype, device=self.device)
        self.shapes = [b.matrix(dtensor.local(b.weight)).shape[:2] for b in blocks]
        self.units = dtensor.segments([s.numel() for s in self.shapes], first.weight, first.has_rows)
        self.split_units = dtensor.groups_within_units(first.weight, first.has_rows)
        by_row = self.coordinates.beta_per_output
        split = [dtensor.sharded(b.weight) and (by_row or b.rows_as_groups) for b in blocks]
        self.own_rows = [dtensor.row_numbers(b.weight) if own else None for b, own in zip(blocks, split, strict=True)]
        self.parameters = [b.weight for b in blocks] + [
            bias for some in zip(*(b.biases for b in blocks), strict=True) for bias in some
        ]
        needs = self.coordinates.needs
        self.layers = Layers(
            Segments([s.inputs if needs >= Statistics.INPUTS else 0 for s in self.stages], self.device),
            Segments([s.units for s in self.stages], self.device),
            torch.tensor([float(b.fan_in) for b in blocks], dtype=self.dtype, device=self.device),
            bool(first.biases),
            self.group,
        )

        self._release()

    def _release(self) -> None:
        """Forget what belongs to a single step: some of it is as large as the model."""
        self.kept: dict[str, Tensor] = {}
        self.batch = Batch(self.one, self.one, self.one)
        self.raised: Tensor | None = None
        self.bias_scale: Tensor | None = None  # β of each unit, for biases
        self.scales: list[BlockScales] = []
        self.alpha: Tensor | None = None  # α of whole layers, packed
        self.on_v, self.direction = OnV([], None), Direction([], None)

    # before the step: coordinates and gradients on v

    def look(self, divisor: Tensor | None = None) -> None:
        """Find the coordinates and the gradient on v; gradients are divided by `divisor`, if there is one."""
        grads = [gradient(p).to(self.dtype) for p in self.parameters]
        self.kept = {name: self.read(name) for name in self.coordinates.state}
        self.batch = self._batch()
        scales = self.coordinates.at(self.kept, self.batch, self.layers)
        self.raised, self.alpha, self.scales = scales.raised, scales.alpha, self._by_block(scales)
        if divisor is not None and self.group.get("reduction") == "sum":
            grads = [grad / divisor.to(grad.device) for grad in grads]
        if self.group["maximize"]:
            grads = [-grad for grad in grads]
        weights, biases = self.as_blocks(grads)
        of_units = [None] * len(weights) if biases is None else self._unpack(biases.sum(0))
        weights = [to_v(w, b, c) for w, b, c in zip(weights, of_units, self.scales, strict=True)]
        self.bias_scale = self._beta_per_unit(scales.beta)
        if self.bias_scale is not None and scales.constant is not None:
            self.bias_scale = self.bias_scale * self.units.widen(scales.constant)
        self.on_v = OnV(weights, biases if biases is None or self.bias_scale is None else biases * self.bias_scale)

    def finite(self) -> Tensor:
        """Whether all gradients are finite."""
        return all_finite([gradient(p) for p in self.parameters])

    def _batch(self) -> Batch:
        """What the hooks added up, packed."""
        if self.coordinates.needs == Statistics.NOTHING or not self.stages:
            return Batch(self.one, self.one, self.one)
        if self.device.type == "cpu" and not torch.compiler.is_compiling():
            found = [s.counts() for s in self.stages]
            self.all_seen = all(uses for _, _, uses, _ in found)
            counts = torch.tensor(found, dtype=self.dtype)
        else:
            counts = torch.stack([s.tally for s in self.stages])
        rows, _, applied, examples = counts.unbind(1)
        if self.coordinates.needs < Statistics.INPUTS:
            return Batch(rows, applied, examples)
        each, inputs = [s.sums() for s in self.stages], self.layers.inputs
        rows = torch.stack([s.rows for s in each])  # with the zeros that a transposed convolution inserts
        first, second = pack([s.first for s in each]), pack([s.second for s in each])
        usable = inputs.every(torch.isfinite(first) & torch.isfinite(second)) & (rows > 0)
        g2 = pack([s.g2 for s in self.stages]) if self.coordinates.needs >= Statistics.GRADIENTS else None
        sums, centre = Sums(inputs.widen(rows), first, second), pack([s.centre for s in self.stages])
        return Batch(rows, applied, examples, usable, sums, centre, g2)

    def _by_block(self, scales: Scales) -> list[BlockScales]:
        """The coordinates of each block."""
        if scales.beta is None:
            betas: Sequence[Tensor | None] = [None] * len(self.blocks)
        else:
            betas = self._own_outputs(scales.beta) if self.coordinates.beta_per_output else scales.beta.unbind()
        if scales.mu is None:
            return [BlockScales(None, beta) for beta in betas]
        mu, alpha, spread, fresh = (self._inputs(v) for v in scales[:4] if v is not None)
        ones = [self.one if beta is None else beta for beta in betas]
        each = zip(mu, alpha, ones, spread, fresh, strict=True)
        return [BlockScales(InputScales(*some), beta) for some, beta in zip(each, betas, strict=True)]

    def _inputs(self, flat: Tensor) -> list[Tensor]:
        """A packed tensor per input as [group, input] of each block."""
        found = []
        for block, part, own in zip(
            self.blocks, torch.split(flat, self.layers.inputs.sizes), self.own_rows, strict=True
        ):
            whole = part.view(block.groups, -1)
            if block.rows_as_groups and block.entry is not None and own is not None:  # the group of each row
                whole = whole[own // block.entry.shape[1]]
            found.append(whole)
        return found

    def _own_outputs(self, flat: Tensor) -> list[Tensor]:
        """A packed tensor per output as [group, unit] of each block: the rows this rank has."""
        parts = zip(torch.split(flat, self.layers.outputs.sizes), self.own_rows, self.shapes, strict=True)
        return [(part if own is None else part[own]).view(shape) for part, own, shape in parts]

    def _beta_per_unit(self, beta: Tensor | None) -> Tensor | None:
        if beta is None:
            return None
        return pack(self._own_outputs(beta)) if self.coordinates.beta_per_output else self.units.widen(beta)

    def _unpack(self, flat: Tensor) -> list[Tensor]:
        """A packed tensor per unit as [group, unit] of each block."""
        return [part.view(shape) for part, shape in zip(torch.split(flat, self.units.sizes), self.shapes, strict=True)]

    # state and tensors on v, as rules see them

    def read(self, name: str) -> Tensor:
        """A field of the blocks' state, packed."""
        return pack([dtensor.local(self.state[b.weight][name]) for b in self.blocks]).to(self.dtype)

    def write(self, name: str, value: Tensor, ok: Tensor | None) -> None:
        """Write a packed field back, unless the mask `ok` says that the step does not count."""
        live = [dtensor.local(self.state[b.weight][name]) for b in self.blocks]
        parts = torch.split(value, [t.numel() for t in live])
        put(live, [part.view(t.shape) for part, t in zip(parts, live, strict=True)], ok)

    def buffers(self, name: str) -> list[Tensor]:
        """A field per parameter of all blocks, as this rank has it: weights, then biases."""
        return [dtensor.local(self.state[p][name]) for p in self.parameters]

    def as_parameters(self, on_v: OnV) -> list[Tensor]:
        """Tensors on v in the shapes of the parameters: weights, then biases."""
        found = [b.unmatrix(w) for b, w in zip(self.blocks, on_v.weights, strict=True)]
        biases = (
            [] if on_v.biases is None else [part for row in on_v.biases for part in torch.split(row, self.units.sizes)]
        )
        shapes = [dtensor.local(p).shape for p in self.parameters[len(found) :]]
        return found + [bias.view(shape) for bias, shape in zip(biases, shapes, strict=True)]

    def as_blocks(self, tensors: list[Tensor]) -> OnV:
        """The inverse of `as_parameters`."""
        count = len(self.blocks)
        weights = [b.matrix(t) for b, t in zip(self.blocks, tensors[:count], strict=True)]
        rows = [pack(tensors[k : k + count]) for k in range(count, len(tensors), count)]
        return OnV(weights, torch.stack(rows) if rows else None)

    def column_scales(self) -> list[Tensor | None]:
        """α β of each column of the blocks' matrices; of whole layers, whatever rows this rank has."""
        if self.alpha is None:
            return [None] * len(self.blocks)
        found: list[Tensor | None] = []
        alphas = torch.split(self.alpha, self.layers.inputs.sizes)
        for block, alpha, c in zip(self.blocks, alphas, self.scales, strict=True):
            kernel = block.matrix(dtensor.local(block.weight)).shape[3]
            scale = alpha.view(block.groups, -1).repeat_interleave(kernel, 1).unsqueeze(1)
            found.append(scale if c.beta is None else scale * c.beta)
        return found

    def stand_ins(self) -> list[list[nn.Parameter]]:
        """For each block parameters that are zero and have its gradients on v, for torch's rules to move."""
        (weights, biases), found = self.on_v, []
        self.on_v = OnV([], None)  # as large as the model: each gradient goes when its stand-in has it
        of_block = [None] * len(weights) if biases is None else torch.split(biases, self.units.sizes, 1)
        for k, block in enumerate(self.blocks):
            weight, bias = weights[k], of_block[k]
            weights[k] = self.one
            if block.rule.joint(block):
                grads = [joined(weight, bias)]
            else:
                rows = (
                    []
                    if bias is None
                    else [row.view(b.shape) for row, b in zip(bias, map(dtensor.local, block.biases), strict=True)]
                )
                grads = [block.unmatrix(weight), *rows]
            found.append([proxy_of(g.to(block.weight.dtype).contiguous()) for g in grads])
        return found

    def take(self, steps: list[list[Tensor]]) -> None:
        """Take what a torch rule has made of the stand-ins for the direction."""
        weights, biases = [], []
        for block, few in zip(self.blocks, steps, strict=True):
            few = [s.to(self.dtype) for s in few]
            if block.rule.joint(block):
                shape = block.matrix(dtensor.local(block.weight)).shape
                weight, rows = parted(few[0], shape, len(block.biases))
            else:
                weight, rows = block.matrix(few[0]), [b.reshape(-1) for b in few[1:]]
            weights.append(weight)
            biases.append(rows)
        by_bias = [pack(column) for column in zip(*biases, strict=True)]
        self.direction = Direction(weights, torch.stack(by_bias) if by_bias else None)

    def unit_square(self, on_v: OnV) -> Tensor:
        """Σ of squares over each unit, its bias included; over all ranks where a unit is split."""
        square = pack([(w * w).sum((-2, -1)) for w in on_v.weights])
        if on_v.biases is not None:
            square = square + (on_v.biases * on_v.biases).sum(0)
        return dtensor.reduced(square, self.split_units)

    def unit_length2(self) -> Tensor:
        """‖u_j‖² of each unit, parts that do not train included; the shortest where a weight serves several biases."""
        found = []
        for block, c in zip(self.blocks, self.scales, strict=True):
            weight, biases = block.whole()
            weight = weight.detach().to(self.dtype)
            biases = None if biases is None else biases.detach().to(self.dtype)
            mu, spread = (None, None) if c.inputs is None else (c.inputs.mu, c.inputs.spread)
            length2 = guards.squared_length(weight, biases, mu, spread)
            found.append(length2 if biases is None else length2.amin(0))
        return dtensor.reduced(pack(found), self.split_units)

    # the step

    def move(self, ok: Tensor | None) -> None:
        """Take the direction on v back to w, hold every unit to its trust radius, and move the parameters."""
        weights, biases, scale = self.direction
        self.direction = Direction([], None)
        steps = [to_w(w, c, self.layers.biased) for w, c in zip(weights, self.scales, strict=True)]
        del weights
        each = [mean_response(s, c.inputs.mu) for s, c in zip(steps, self.scales, strict=True) if c.inputs is not None]
        along = pack(each) if each else None
        gain, biases = self._scaled(biases, scale)
        if self.stages:
            factor = self._trust(steps, along, gain, biases)
            if factor is not None:
                gain, biases = gain * factor, None if biases is None else biases * factor
        if biases is not None and along is not None:
            biases = biases - gain * along
        own = along is not None  # otherwise a step may be a gradient, or a momentum buffer
        gains = self._unpack(gain) if isinstance(gain, Tensor) and gain.dim() else [gain] * len(steps)
        for k, g in enumerate(gains):
            g = per_unit(g) if isinstance(g, Tensor) else g
            steps[k] = steps[k].mul_(g) if own else steps[k] * g
        self._displace(self.as_parameters(OnV(steps, biases)), ok)

    def _scaled(self, biases: Tensor | None, scale: Tensor | None) -> tuple[Any, Tensor | None]:
        """How far each unit goes along its direction, stepsize and the rule's scale; and the steps of biases on v."""
        if self.rule.own_rate:
            gain, rates = -1.0, [-1.0] * (0 if biases is None else len(biases))
        else:
            gain, *rates = (self._common(column) for column in zip(*(b.rates() for b in self.blocks), strict=True))
        if biases is not None:
            biases = torch.stack([bias * rate for bias, rate in zip(biases, rates, strict=True)])
            for factor in (self.bias_scale, scale):
                biases = biases if factor is None else biases * factor
        return gain if scale is None else gain * scale, biases

    def _common(self, rates: Sequence[Any]) -> Any:
        """The stepsize that all blocks have, or one per unit."""
        if all(rate is rates[0] or (not isinstance(rate, Tensor) and rate == rates[0]) for rate in rates):
            return rates[0]
        # filled on the device, so that a CUDA graph can be captured
        each = [r.to(self.one) if isinstance(r, Tensor) else self.one.new_full((), r) for r in rates]
        return self.units.widen(torch.stack(each))

    def _trust(self, steps: list[Tensor], along: Tensor | None, gain: Any, biases: Tensor | None) -> Tensor | None:
        """The factor that holds each unit to its trust radius; what the guards did is counted."""
        radius, none = self.group["trust"], self.one.new_zeros(len(self.blocks))
        raised = none if self.raised is None else self.raised
        if radius is None:
            if self.group.get("fresh_max") is not None:
                self._count(raised, none, none)
            return None
        step2 = (
            gain
            * gain
            * pack([guards.stretch(s, c.inputs and c.inputs.fresh) for s, c in zip(steps, self.scales, strict=True)])
        )
        if biases is not None:
            step2 = step2 + (biases * biases).amax(0)
        elif along is not None:
            step2 = step2 + (gain * along).square()
        unit2 = self.unit_length2()
        relative2 = guards.relative(unit2, step2, guards.TRUST_FLOOR)
        typical2 = None if self.rule.linear else guards.typical(relative2, self.units)
        factor, over = guards.trust_factor(unit2, step2, radius, guards.TRUST_FLOOR, typical2)
        self._count(raised, self.units.total(over.to(factor.dtype)), self.units.most(relative2).sqrt())
        return factor

    def _count(self, raised: Tensor, held: Tensor, largest: Tensor) -> None:
        """Count on the device what the guards did."""
        last = torch.stack([raised, held, largest], 1).float()
        foreach.copy_([s.last for s in self.stages], last.unbind())
        counted = torch.cat([last[:, :2], torch.ones_like(last[:, :1])], 1)
        foreach.add_([s.fired for s in self.stages], counted.unbind())

    def _displace(self, steps: list[Tensor], ok: Tensor | None) -> None:
        """p ← (1 − lr · weight_decay) p − step, or nothing where the mask says so."""
        params = [dtensor.local(p).detach() for p in self.parameters]
        columns = zip(*(zip(b.rates(), b.param_groups, strict=True) for b in self.blocks), strict=True)
        for p, (rate, group) in zip(params, (pair for column in columns for pair in column), strict=True):
            if group["weight_decay"]:
                shrink = rate * group["weight_decay"]
                p.mul_(1 - (shrink if ok is None else torch.where(ok, shrink, 0.0)))
        if ok is not None:
            steps = [torch.where(ok, s, 0) for s in steps]
        foreach.add_(params, steps, alpha=-1.0)

    # after the step

    def commit(self, ok: Tensor | None) -> None:
        """Let the batch join the moments, and the next one be summed about the running mean."""
        after = self.coordinates.after(self.kept, self.batch, self.layers)
        if ok is not None:
            after = {name: torch.where(ok, new, self.kept[name]) for name, new in after.items()}
        for name, value in after.items():
            self.write(name, value, None)
        if "mx" in after:
            started = self.layers.inputs.widen(after["mass"] > 0)
            centres = torch.split(torch.where(started, after["mx"], torch.nan), self.layers.inputs.sizes)
            recentre(self.stages, centres)
        self._release()


def widest(blocks: Sequence[Block], stages: Sequence[LayerStatistics], state: Any) -> torch.dtype:
    """What to compute in: float32 or better, and no less than state that a model of another dtype has left."""
    names = schema_of(blocks[0])
    kept = [state[b.weight][name].dtype for b in blocks for name in names if name in state[b.weight]]
    return functools.reduce(
        torch.promote_types, [*kept, *(s.centre.dtype for s in stages)], accumulation_dtype(blocks[0].weight.dtype)
    )


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors flat, one after another."""
    return torch.cat([t.reshape(-1) for t in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)


def to_v(weight: Tensor, bias: Tensor | None, c: BlockScales) -> Tensor:
    """The gradient on v of a block's weight."""
    if c.inputs is None:
        return weight if c.beta is None else weight * c.beta
    if bias is None:
        return change_of_variables.gradient_to_v_biasless(weight, c.inputs)
    return change_of_variables.weights_to_v(weight, bias, c.inputs)


def to_w(weight: Tensor, c: BlockScales, biased: bool) -> Tensor:
    """The direction on w of a block's weight from one on v."""
    if c.inputs is None:
        return weight if c.beta is None else weight * c.beta
    if biased:
        return change_of_variables.weights_to_w(weight, c.inputs)
    return change_of_variables.step_to_w_biasless(weight, c.inputs)
