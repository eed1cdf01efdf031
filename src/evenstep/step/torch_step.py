"""The step of many blocks in torch operations: the reference, and the way on every device without Triton.

What belongs to inputs, units or layers is packed into flat tensors, one block after another; only what is as large as
the weights is done block by block.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .. import foreach
from ..coordinates.coordinates import Batch, Layers, Statistics
from ..math import guards
from ..math.change_of_variables import Scales, mean_response, per_unit, scaled, step_to_w_biasless, weights_to_v
from ..math.moments import Sums, accumulation_dtype
from ..math.moments import usable as usable_sums
from ..math.segments import Segments
from ..parallel import dtensor
from ..rules.rule import Direction, OnV, RuleStep, pack
from ..statistics.batch import LayerStatistics, recentre
from .block import Block, all_finite, gradient
from .state import schema_of


class TorchStep(RuleStep):
    """The step of blocks that share device, dtype, coordinates, rule and settings, and have equally many biases."""

    needs_direction = True

    def __init__(self, blocks: Sequence[Block], state: Any) -> None:
        """Either all blocks belong to layers, or none."""
        self.stages = [block.statistics for block in blocks if block.statistics is not None]
        super().__init__(blocks, state, widest(blocks, self.stages, state))
        first = blocks[0]
        self.coordinates, self.all_seen = first.coordinates, True
        by_row = self.coordinates.beta_per_output
        split = [dtensor.sharded(b.weight) and (by_row or b.rows_as_groups) for b in blocks]
        self.own_rows = [dtensor.row_numbers(b.weight) if own else None for b, own in zip(blocks, split, strict=True)]
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
        self.batch = Batch(self.one, self.one, self.one, self.one)
        self.bias_scale: Tensor | None = None  # β of each unit, for biases
        self.packed, self.scales = Scales(), []
        self.on_v, self.direction = OnV([], None), Direction([], None)

    # before the step: coordinates and gradients on v

    def look(self, divisor: Tensor | None = None) -> None:
        """Find the coordinates and the gradient on v; gradients are divided by `divisor`, if there is one."""
        grads = [gradient(p).to(self.dtype) for p in self.parameters]
        self.kept = {name: self.read(name) for name in self.coordinates.state}
        self.batch = self._batch()
        self.packed = self.coordinates.at(self.kept, self.batch, self.layers)
        self.scales, self.bias_scale = self._by_block(self.packed), self._bias_scale(self.packed)
        if divisor is not None and self.group.get("reduction") == "sum":
            grads = [grad / divisor.to(grad.device) for grad in grads]
        if self.group["maximize"]:
            grads = [-grad for grad in grads]
        weights, biases = self.as_blocks(grads)
        of_units = [None] * len(weights) if biases is None else self.per_unit(biases.sum(0))
        weights = [weights_to_v(w, b, c) for w, b, c in zip(weights, of_units, self.scales, strict=True)]
        self.on_v = OnV(weights, biases if biases is None or self.bias_scale is None else biases * self.bias_scale)

    def finite(self) -> Tensor:
        """Whether all gradients are finite."""
        return all_finite([gradient(p) for p in self.parameters])

    def _batch(self) -> Batch:
        """What the hooks added up, packed."""
        if self.coordinates.needs == Statistics.NOTHING or not self.stages:
            return self.batch
        if self.device.type == "cpu" and not torch.compiler.is_compiling():
            found = [s.counts() for s in self.stages]
            self.all_seen = all(uses for _, _, uses, _ in found)
            counts = torch.tensor(found, dtype=self.dtype)
        else:
            counts = torch.stack([s.tally for s in self.stages])
        rows, _, applied, examples = counts.unbind(1)
        if self.coordinates.needs < Statistics.INPUTS:
            return Batch(rows, applied, examples, rows > 0)
        each, inputs = [s.sums() for s in self.stages], self.layers.inputs
        rows = torch.stack([s.rows for s in each])  # with the zeros that a transposed convolution inserts
        sums = Sums(rows, pack([s.first for s in each]), pack([s.second for s in each]))
        g2 = pack([s.g2 for s in self.stages]) if self.coordinates.needs >= Statistics.GRADIENTS else None
        usable, centre = usable_sums(sums, inputs), pack([s.centre for s in self.stages])
        return Batch(rows, applied, examples, usable, sums._replace(rows=inputs.widen(rows)), centre, g2)

    def _by_block(self, scales: Scales) -> list[Scales]:
        """The coordinates of each block: [group, input], and [group, unit] or one number for β."""

        def split(flat: Tensor | None, how: Callable[[Tensor], Sequence[Tensor]]) -> Sequence[Tensor | None]:
            return [None] * len(self.blocks) if flat is None else how(flat)

        mu, alpha, spread, fresh = (split(flat, self._inputs) for flat in scales[:4])
        betas = split(scales.beta, self._own_outputs if self.coordinates.beta_per_output else Tensor.unbind)
        each = zip(mu, alpha, spread, fresh, betas, strict=True)
        return [Scales(m, a, s, f, beta=beta) for m, a, s, f, beta in each]

    def column_scales(self) -> list[Tensor | None]:
        """How far a step of 1 on v moves the weights of each column: [group, 1, column] of each layer; None for 1."""
        if self.packed.alpha is None:
            return [None] * len(self.blocks)
        parts = torch.split(self.packed.alpha, self.layers.inputs.sizes)
        alphas = [part.view(block.groups, -1) for part, block in zip(parts, self.blocks, strict=True)]
        each = zip(alphas, self.scales, self.shapes, strict=True)
        scales = [(alpha if c.beta is None else alpha * c.beta, shape[3]) for alpha, c, shape in each]
        return [scale.repeat_interleave(kernel, 1).unsqueeze(1) for scale, kernel in scales]

    def _inputs(self, flat: Tensor) -> list[Tensor]:
        """A packed tensor per input as [group, input] of each block."""
        found = []
        parts = zip(self.blocks, torch.split(flat, self.layers.inputs.sizes), self.own_rows, strict=True)
        for block, part, own in parts:
            whole = part.view(block.groups, -1)
            if block.rows_as_groups and own is not None:  # the group of each row
                whole = whole[own // (block.units // block.groups)]
            found.append(whole)
        return found

    def _own_outputs(self, flat: Tensor) -> list[Tensor]:
        """A packed tensor per output as [group, unit] of each block: the rows this rank has."""
        parts = zip(torch.split(flat, self.layers.outputs.sizes), self.own_rows, self.shapes, strict=True)
        return [(part if own is None else part[own]).view(shape[:2]) for part, own, shape in parts]

    def _bias_scale(self, scales: Scales) -> Tensor | None:
        """How far a step of 1 on v moves each unit's bias."""
        if scales.beta is None:
            return None
        beta = scales.beta
        beta = pack(self._own_outputs(beta)) if self.coordinates.beta_per_output else self.units.widen(beta)
        return beta if scales.constant is None else beta * self.units.widen(scales.constant)

    # the step

    def move(self, ok: Tensor | None) -> None:
        """Take the direction on v back to w, hold every unit to its trust radius, and move the parameters."""
        weights, biases, scale = self.direction
        self.direction = Direction([], None)
        back = scaled if self.layers.biased else step_to_w_biasless
        steps = [back(w, c) for w, c in zip(weights, self.scales, strict=True)]
        del weights
        each = [mean_response(s, c.mu) for s, c in zip(steps, self.scales, strict=True) if c.mu is not None]
        along = pack(each) if each else None
        gain, biases = self._scaled(biases, scale)
        factor = self._trust(steps, along, gain, biases) if self.stages else None
        if factor is not None:
            gain, biases = gain * factor, None if biases is None else biases * factor
        if biases is not None and along is not None:
            biases = biases - gain * along
        own = along is not None  # otherwise a step may be a gradient, or a momentum buffer
        gains = self.per_unit(gain) if isinstance(gain, Tensor) and gain.dim() else [gain] * len(steps)
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
        none = self.one.new_zeros(len(self.blocks))
        raised = none if self.packed.raised is None else self.packed.raised
        if not guards.bounds_steps(self.group):
            if self.group.get("fresh_max") is not None:
                self._count(raised, none, none)
            return None
        stretch = pack([guards.stretch(s, c.fresh) for s, c in zip(steps, self.scales, strict=True)])
        step2 = gain * gain * stretch
        if biases is not None:
            step2 = step2 + (biases * biases).amax(0)
        elif along is not None:
            step2 = step2 + (gain * along).square()
        unit2 = self.unit_length2()
        relative2 = guards.relative(unit2, step2)
        typical2 = None if self.rule.linear else guards.typical(relative2, self.units)
        factor, over = guards.trust_factor(unit2, step2, self.group, typical2)
        self._count(raised, self.units.total(over.to(factor.dtype)), self.units.most(relative2).sqrt())
        return factor

    def _count(self, raised: Tensor, held: Tensor, largest: Tensor) -> None:
        """Count on the device what the guards did."""
        last = torch.stack([raised, held, largest], 1).float()
        foreach.copy_([s.last for s in self.stages], last.unbind())
        counted = torch.cat([last[:, :2], torch.ones_like(last[:, :1])], 1)
        foreach.add_([s.fired for s in self.stages], counted.unbind())

    def _displace(self, steps: list[Tensor], ok: Tensor | None) -> None:
        """p ← (1 − lr · weight_decay) p − step, or nothing where the mask says so.

        Departs from §4.2, where L2 is a term of the loss: the decay is decoupled, on w.
        """
        params = [self.blocks[0].local(p).detach() for p in self.parameters]
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
    dtypes = [accumulation_dtype(blocks[0].weight.dtype), *kept, *(s.centre.dtype for s in stages)]
    found: torch.dtype = reduce(torch.promote_types, dtypes)
    return found
