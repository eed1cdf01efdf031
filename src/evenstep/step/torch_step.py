"""The step of many blocks in torch operations: the reference, and the way on every device without Triton.

What belongs to inputs, units or layers is packed into flat tensors, one block after another; only what is as large as
the weights is done block by block.
"""

from collections.abc import Sequence
from functools import reduce
from math import isfinite
from operator import add
from typing import Any

import torch
from torch import Tensor

from .. import foreach
from ..coordinates.coordinates import Batch, Layers, Statistics
from ..math import guards
from ..math.change_of_variables import Scales, response, scaled, step_to_w_biasless, weights_to_v
from ..math.moments import Sums, accumulation_dtype, add_zeros, batch_moments
from ..math.moments import usable as has_moments
from ..math.segments import Segments
from ..parallel import dtensor
from ..rules.rule import Direction, OnV, RuleStep, pack
from ..statistics.layer_statistics import set_centres
from .block import Block, all_finite, gradient


class TorchStep(RuleStep):
    """The step of blocks that share device, dtype, coordinates, rule and settings, and have equally many biases."""

    needs_direction = True

    def __init__(self, blocks: Sequence[Block], state: Any) -> None:
        """Either all blocks belong to layers, or none."""
        self.stages = [block.statistics for block in blocks if block.statistics is not None]
        dtypes = [accumulation_dtype(blocks[0].weight.dtype), *(s.centre.dtype for s in self.stages)]
        super().__init__(blocks, state, reduce(torch.promote_types, dtypes))
        first = blocks[0]
        self.coordinates, self.all_seen = first.coordinates, True
        self.found: list[list[float]] = []  # the counts of the last batch, as the host knows them
        self.none, self.each = self.one.new_zeros(len(blocks)), self.one.new_ones(len(blocks))
        needs = self.coordinates.needs
        self.layers = Layers(
            Segments([s.inputs if needs >= Statistics.INPUTS else 0 for s in self.stages], self.device),
            Segments([s.units for s in self.stages], self.device),
            torch.tensor([float(b.fan_in) for b in blocks], dtype=self.dtype, device=self.device),
            bool(first.biases),
            self.group,
        )
        if needs >= Statistics.INPUTS:
            self._lay_out_columns()
        self._release()

    def _lay_out_columns(self) -> None:
        """Find the input of each column of the blocks' matrices, and the group of each row."""
        first, inputs = 0, []
        for block, count in zip(self.blocks, self.layers.inputs.sizes, strict=True):
            kernel = block.layout(block.local(block.weight)).shape[3]
            inputs.append(torch.arange(first, first + count).repeat_interleave(kernel))
            first += count
        self.columns = [len(each) for each in inputs]
        # None: one column for each input
        self.input_of = None if sum(self.columns) == first else torch.cat(inputs).to(self.device)
        self.group_of = [b.group_of_rows() if b.groups > 1 else None for b in self.blocks]

    def _release(self) -> None:
        """Forget what belongs to a single step: some of it is as large as the model."""
        self.kept: dict[str, Tensor] = {}
        self.batch = Batch(self.one, self.one, self.one, self.one)
        self.bias_scale: Tensor | None = None  # β of each unit, for biases
        self.packed, self.scales = Scales(), []
        self.on_v, self.direction = OnV([], []), Direction([], [])

    # before the step: coordinates and gradients on v

    def look(self, divisor: Tensor | None = None) -> None:
        """Find the coordinates and the gradient on v; gradients are divided by `divisor`, if there is one."""
        self.square, self.length2 = None, None
        grads = self.wide([gradient(p) for p in self.parameters])
        self.kept = {name: self.read(name) for name in self.coordinates.state}
        self.batch = self._batch()
        self.packed = self.coordinates.at(self.kept, self.batch, self.layers)
        self.scales, self.bias_scale = self._by_block(self.packed), self._bias_scale(self.packed)
        if divisor is not None and self.group.get("reduction") == "sum":
            grads = [grad / divisor.to(grad.device) for grad in grads]
        if self.group["maximize"]:
            grads = [-grad for grad in grads]
        weights, biases = self.as_blocks(grads)
        of_units: Sequence[Tensor | None] = [None] * len(weights)
        if biases:
            of_units = self.rows(sum(biases[1:], biases[0]))
        weights = [weights_to_v(w, b, c) for w, b, c in zip(weights, of_units, self.scales, strict=True)]
        scale = self.bias_scale
        self.on_v = OnV(weights, biases if scale is None else [bias * scale for bias in biases])
        self.owned = self.packed.alpha is not None and (scale is not None or len(weights) > 1)

    def finite(self) -> Tensor:
        """Whether all gradients are finite."""
        if self.on_host() and isfinite(self.unit_square().sum().item()):  # which many rules need anyway
            return torch.ones((), dtype=torch.bool)
        return all_finite([gradient(p) for p in self.parameters])

    def _batch(self) -> Batch:
        """What the hooks added up, packed."""
        if self.coordinates.needs == Statistics.NOTHING or not self.stages:
            return self.batch
        found = [[*map(add, s.counter.tolist(), s.counted)] for s in self.stages] if self.on_host() else []
        if not found or found != self.found:  # most batches are alike
            tallies = self.one.new_tensor(found) if found else torch.stack([s.tally for s in self.stages])
            counts = self.wide([tallies])[0].unbind(1)
            self.found, self.counts = found, [*counts, counts[0] > 0, self.layers.inputs.widen(counts[0])]
            self.all_seen, self.all_rows = (all(counts[k] for counts in found) for k in (2, 0))
        rows, zeros, applied, examples, some, of_inputs = self.counts
        if self.coordinates.needs < Statistics.INPUTS:
            return Batch(rows, applied, examples, some)
        widen, centre = self.layers.inputs.widen, pack([s.centre for s in self.stages])
        moments = [s.moments for s in self.stages if s.moments is not None and not s.stuffed]
        if self.on_host() and len(moments) == len(self.stages):
            offset, var = (torch.cat(each) for each in list(zip(*moments, strict=True))[:2])
        else:
            sums = Sums(of_inputs, *torch.cat([s.slots for s in self.stages], 2).sum(0).unbind())
            if any(s.stuffed for s in self.stages):
                sums, rows = add_zeros(sums, widen(zeros), centre), rows + zeros
            offset, var = batch_moments(sums)
        complete = self.on_host() and self.all_rows and all(self.kept["mass"].tolist())
        complete = complete and torch.equal(centre, self.kept["mx"]) and isfinite(var.sum().item())
        usable = some if complete else has_moments(rows, offset, var, self.layers.inputs)
        g2 = pack([s.g2 for s in self.stages]) if self.coordinates.needs >= Statistics.GRADIENTS else None
        return Batch(rows, applied, examples, usable, offset, var, centre, g2, complete)

    def on_host(self) -> bool:
        """Whether reading a tensor costs nothing."""
        return self.device.type == "cpu" and not torch.compiler.is_compiling()

    def _by_block(self, scales: Scales) -> list[Scales]:
        """The coordinates of each block, as its matrix has them."""
        betas: Sequence[Tensor | None] = [None] * len(self.blocks)
        if scales.beta is not None:
            betas = self._own_outputs(scales.beta) if self.coordinates.beta_per_output else scales.beta.unbind()
        if scales.alpha is None:
            return [Scales(beta=beta) for beta in betas]
        wide = [x if self.input_of is None else x.index_select(0, self.input_of) for x in scales[:4] if x is not None]
        parts = zip(*(torch.split_with_sizes(x, self.columns) for x in wide), strict=True)
        found = []
        for block, rows, group, beta in zip(self.blocks, parts, self.group_of, betas, strict=True):
            mu, alpha, spread, fresh = rows if group is None else [x.view(block.groups, -1)[group] for x in rows]
            found.append(Scales(mu, alpha, spread, fresh, beta=beta))
        return found

    def column_scales(self) -> Sequence[Tensor | None]:
        """α β of each column of the blocks' whole matrices, whatever rows this rank has."""
        alpha = self.packed.alpha
        if alpha is None:
            return [None] * len(self.blocks)
        columns = torch.split_with_sizes(alpha if self.input_of is None else alpha[self.input_of], self.columns)
        parts = zip(self.blocks, columns, self.scales, strict=True)
        return [part.view(b.groups, -1) * (1 if c.beta is None else c.beta) for b, part, c in parts]

    def constant_sizes(self) -> Tensor:
        """√(1 + mean μ²) of each block."""
        if self.packed.constant is None or self.packed.beta is None:
            return super().constant_sizes()
        return self.packed.constant * self.packed.beta

    def _own_outputs(self, flat: Tensor) -> list[Tensor]:
        """A packed tensor per output as [unit] of each block: the rows this rank has."""
        parts = zip(self.blocks, torch.split_with_sizes(flat, self.layers.outputs.sizes), strict=True)
        return [dtensor.part(part, b.weight) if dtensor.sharded(b.weight) else part for b, part in parts]

    def _bias_scale(self, scales: Scales) -> Tensor | None:
        """How far a step of 1 on v moves each unit's bias."""
        if scales.beta is None:
            return None
        beta = scales.beta
        beta = pack(self._own_outputs(beta)) if self.coordinates.beta_per_output else self.units.widen(beta)
        return beta if scales.constant is None else beta * self.units.widen(scales.constant)

    def held_addresses(self) -> list[int]:
        """None: this step is not replayed."""
        return []

    # the step

    def move(self, ok: Tensor | None) -> None:
        """Take the direction on v back to w, hold every unit to its trust radius, and move the parameters."""
        weights, biases, scale = self.direction
        self.direction = Direction([], [])
        back = scaled if self.layers.biased else step_to_w_biasless
        steps = [back(w, c) for w, c in zip(weights, self.scales, strict=True)]
        del weights
        each = [response(s, c.mu) for s, c in zip(steps, self.scales, strict=True) if c.mu is not None]
        along = pack(each) if each else None
        gain, biases = self._scaled(biases, scale)
        factor = self._trust(steps, along, gain, biases) if self.stages else None
        if factor is not None:
            gain, biases = gain * factor, [bias * factor for bias in biases]
        if biases and along is not None:
            mean = gain * along
            biases = [bias - mean for bias in biases]
        own = along is not None  # otherwise a step may be a gradient, or a momentum buffer
        gains = self.rows(gain) if isinstance(gain, Tensor) and gain.dim() else [gain] * len(steps)
        for k, g in enumerate(gains):  # one by one: each may be as large as its weight
            steps[k] = steps[k].mul_(g) if own else steps[k] * g
        self._displace(self.as_parameters(OnV(steps, biases)), ok)

    def _scaled(self, biases: list[Tensor], scale: Tensor | None) -> tuple[Any, list[Tensor]]:
        """How far each unit goes along its direction, stepsize and the rule's scale; and the steps of biases on v."""
        rates: list[Any]
        if self.rule.own_rate:
            gain, rates = -1.0, [-1.0] * len(biases)
        else:
            gain, *rates = (self._common(column) for column in zip(*(b.rates() for b in self.blocks), strict=True))
        for factor in (self.bias_scale, scale):
            rates = rates if factor is None else [rate * factor for rate in rates]
        biases = [bias * rate for bias, rate in zip(biases, rates, strict=True)]
        return gain if scale is None else gain * scale, biases

    def _common(self, rates: Sequence[Any]) -> Any:
        """The stepsize that all blocks have, or one per unit."""
        if all(rate is rates[0] or (not isinstance(rate, Tensor) and rate == rates[0]) for rate in rates):
            return rates[0]
        # filled on the device, so that a CUDA graph can be captured
        each = [r.to(self.one) if isinstance(r, Tensor) else self.one.new_full((), r) for r in rates]
        return self.units.widen(torch.stack(each))

    def _trust(self, steps: list[Tensor], along: Tensor | None, gain: Any, biases: list[Tensor]) -> Tensor | None:
        """The factor that holds each unit to its trust radius; what the guards did is counted."""
        none = self.none
        raised = none if self.packed.raised is None else self.packed.raised
        if not guards.bounds_steps(self.group):
            if self.group.get("fresh_max") is not None:
                self._count(raised, none, none)
            return None
        stretch = pack([guards.stretch(s, c.fresh) for s, c in zip(steps, self.scales, strict=True)])
        step2 = gain * gain * stretch
        if biases:
            longest = biases[0] if len(biases) == 1 else torch.stack(biases).abs().amax(0)
            step2 = torch.addcmul(step2, longest, longest)
        elif along is not None:
            step2 = step2 + (gain * along).square()
        unit2 = self.unit_length2().clamp(min=guards.TRUST_FLOOR**2)
        relative2 = step2 / unit2
        largest2 = self.units.most(relative2)
        if self.on_host() and guards.cannot_fire(largest2.max().item(), self.group, self.rule.linear):
            self._count(raised, none, largest2.sqrt())
            return None
        typical2 = None if self.rule.linear else guards.typical(relative2, self.units)
        factor, over = guards.trust_factor(unit2, step2, self.group, typical2)
        self._count(raised, self.units.total(over.to(factor.dtype)), largest2.sqrt())
        return factor

    def _count(self, raised: Tensor, held: Tensor, largest: Tensor) -> None:
        """Count on the device what the guards did."""
        foreach.copy_([s.last for s in self.stages], torch.stack([raised, held, largest], 1).unbind())
        fired = torch.stack([raised, held, self.each], 1)
        foreach.add_([s.fired for s in self.stages], fired.unbind())

    def _displace(self, steps: list[Tensor], ok: Tensor | None) -> None:
        """p ← (1 − lr · weight_decay) p − step, or nothing where the mask says so.

        Departs from §4.2, where L2 is a term of the loss: the decay is decoupled, on w.
        """
        params = [self.blocks[0].local(p) for p in self.parameters]
        if any(group["weight_decay"] for block in self.blocks for group in block.param_groups):
            columns = zip(*(zip(b.rates(), b.param_groups, strict=True) for b in self.blocks), strict=True)
            for p, (rate, group) in zip(params, (pair for column in columns for pair in column), strict=True):
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
        self.write(after, None)
        if "mx" in after:
            centre = after["mx"]
            if not self.batch.complete:  # some layers may have no moments yet
                centre = torch.where(self.layers.inputs.widen(after["mass"] > 0), centre, torch.nan)
            set_centres(
                self.stages, torch.split_with_sizes(centre, self.layers.inputs.sizes), known=self.batch.complete
            )
        self._release()
