"""The step of many blocks in torch operations: the reference, and the way on every device without Triton.

What belongs to inputs, units or layers is packed into flat tensors, one block after another; only what is as large as
the weights is done block by block.
"""

from collections.abc import Sequence
from functools import reduce
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from .. import foreach
from ..coordinates.coordinates import Batch, Layers, Statistics
from ..math import guards
from ..math.change_of_variables import Scales, scaled, step_to_w_biasless, weights_to_v
from ..math.moments import Sums, accumulation_dtype, add_zeros, batch_moments
from ..math.moments import usable as has_moments
from ..math.segments import Segments
from ..parallel import dtensor
from ..rules.rule import Columns, Direction, OnV, RuleStep, pack
from .block import Block, all_finite, gradient


class TorchStep(RuleStep):
    """The step of blocks that share device, dtype, coordinates, rule and settings, and have equally many biases."""

    needs_direction = True

    def __init__(self, blocks: Sequence[Block], state: Any, *, compiled: bool = False) -> None:
        """Either all blocks belong to layers, or none."""
        self.stages = [block.statistics for block in blocks if block.statistics is not None]
        dtypes = [accumulation_dtype(blocks[0].weight.dtype), *(s.centre.dtype for s in self.stages)]
        super().__init__(blocks, state, reduce(torch.promote_types, dtypes), compiled=compiled)
        first = blocks[0]
        self.coordinates, self.all_seen = first.coordinates, True
        self.groups = list({id(group): group for block in blocks for group in block.param_groups}.values())
        self.counts: list[list[float]] = []  # of the last batch, as the host knows them
        self.committed: list[Tensor] | None = None  # the same, packed, of the last batch that has joined the state
        self.tallies: list[Tensor] = []
        self.none, self.each = self.one.new_zeros(len(blocks)), self.one.new_ones(len(blocks))
        needs, schema = self.coordinates.needs, self.coordinates.state
        self.per_input = [name for name, field in schema.items() if field.per == "input"]
        self.per_layer = [name for name in schema if name not in (*self.per_input, "mass")]
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
        self.widths = [len(each) for each in inputs]  # in columns
        # None: one column for each input
        self.input_of = None if sum(self.widths) == first else torch.cat(inputs).to(self.device)
        self.group_of = [b.group_of_rows() if b.groups > 1 else None for b in self.blocks]
        # kept, as new views would take longer than what is done with them
        self.of_columns = self.one.new_empty(4, sum(self.widths))
        self.column_parts = self._split(self.of_columns)

    def _split(self, every: Tensor) -> list[Sequence[Tensor]]:
        """Numbers per column, of each block."""
        return [torch.split_with_sizes(each, self.widths) for each in every.unbind()]

    def _release(self) -> None:
        """Forget what belongs to a single step: some of it is as large as the model."""
        self.kept: dict[str, Any] = {}
        self.packed, self.columns = Scales(), Columns()
        self.scales: list[Scales] = []  # of each block, if it has no bias or a β per unit
        self.bias_scale: Tensor | None = None  # β of each unit, for biases
        self.on_v, self.direction = OnV([], []), Direction([], [])

    # before the step: coordinates and gradients on v

    def look(self, divisor: Tensor | None = None) -> None:
        """Find the coordinates and the gradient on v; gradients are divided by `divisor`, if there is one."""
        self.square, self.length2, self.pending = None, None, {}
        self._find_batch()
        self.packed = self.coordinates.at(self.kept, self.batch, self.layers)
        self._by_block(self.packed)
        weights, biases = self.as_blocks(self._gradients(divisor))
        scale, mu = self.bias_scale, self.columns.mu
        rows: Sequence[Any] = self.rows(sum(biases[1:], biases[0])) if biases else [None] * len(weights)
        if self.scales:
            weights = [*map(weights_to_v, weights, rows, self.scales)]
        elif mu:  # the same of all blocks at once
            weights = self._scaled(list(foreach.addcmul(weights, mu, rows, value=-1)), own=True)
        else:
            weights = self._scaled(weights, own=False)
        self.on_v = OnV(weights, biases if scale is None else [bias * scale for bias in biases])
        self.owned = bool(mu) and (scale is not None or len(weights) > 1)

    def _gradients(self, divisor: Tensor | None) -> Sequence[Tensor]:
        """The gradients of the parameters: those of a descent, of a mean loss."""
        grads = self.wide([*map(gradient, self.parameters)])
        if divisor is not None and self.group.get("reduction") == "sum":
            grads = [grad / divisor.to(grad.device) for grad in grads]
        return [-grad for grad in grads] if self.group["maximize"] else grads

    def finite(self) -> Tensor | bool:
        """Whether all gradients are finite."""
        if self.on_host:  # squares of large gradients overflow, though
            weights, biases = self.on_v
            norms = torch.stack(torch._foreach_norm([*weights, *biases])) if self.rule.linear else None
            if isfinite((self.unit_square() if norms is None else norms).sum().item()):  # which other rules need anyway
                return True
        return all_finite([*map(gradient, self.parameters)])

    def _find_batch(self) -> None:
        """Read the state of the coordinates, and what the hooks added up."""
        needs, self.kept, self.batch = self.coordinates.needs, {}, Batch(self.one, self.one, self.one, self.one)
        if needs == Statistics.NOTHING or not self.stages:
            return
        self._find_counts()
        rows, _, applied, examples, some = self.tallies
        self.kept = {name: self.read(name) for name in self.per_layer}
        self.batch = Batch(rows, applied, examples, some, alike=self.committed is self.tallies)
        if needs >= Statistics.INPUTS:
            self._find_moments()

    def _find_moments(self) -> None:
        """Read the running moments, and those of the batch."""
        rows, zeros, applied, examples, usable = self.tallies
        moments = [s.moments for s in self.stages if s.moments is not None and not s.stuffed]
        direct = self.on_host and len(moments) == len(self.stages)
        lists = [[s.centre for s in self.stages], *map(self.live, self.per_input)]
        lists += [[*each] for each in zip(*moments, strict=True)][:2] if direct else []
        # all at once: each operation takes longer than its arithmetic
        centre, *found = self.wide(torch.cat([t for each in lists for t in each]).chunk(len(lists)))
        self.kept.update(zip(self.per_input, found, strict=False))
        if direct:
            offset, var = found[-2:]
        else:
            sums = Sums(self.layers.inputs.widen(rows), *torch.cat([s.slots for s in self.stages], 2).sum(0).unbind())
            if any(s.stuffed for s in self.stages):
                sums, rows = add_zeros(sums, self.layers.inputs.widen(zeros), centre), rows + zeros
            offset, var = batch_moments(sums)
        mass = self.number("mass")
        complete = self.on_host and self.all_rows and isinstance(mass, float) and mass > 0
        complete = complete and isfinite(var.sum().item())
        if not complete:
            mass = mass if isinstance(mass, Tensor) else torch.full_like(rows, mass)
            usable = has_moments(rows, offset, var, self.layers.inputs)
        self.kept["mass"] = mass
        g2 = pack([s.g2 for s in self.stages]) if self.coordinates.needs >= Statistics.GRADIENTS else None
        self.batch = Batch(rows, applied, examples, usable, centre + offset, var, g2, complete, self.batch.alike)

    def _find_counts(self) -> None:
        """Find what the hooks counted, per layer."""
        found = [s.counts() for s in self.stages] if self.on_host else []
        if not found or found != self.counts:  # most batches are alike
            tallies = self.one.new_tensor(found) if found else torch.stack([s.tally for s in self.stages])
            counts = self.wide([tallies])[0].unbind(1)
            self.counts, self.tallies = found, [*counts, counts[0] > 0]
            self.all_seen, self.all_rows = (all(counts[k] for counts in found) for k in (2, 0))

    def _by_block(self, scales: Scales) -> None:
        """Find the coordinates of each block, as its matrix has them."""
        beta = scales.beta
        betas: Sequence[Any] = [None] * len(self.blocks)  # a number for each, or one per unit
        if beta is not None and self.coordinates.beta_per_output:
            betas, beta = self._own_outputs(beta), None
            self.bias_scale = pack(betas)
        elif beta is not None:
            betas, self.bias_scale = beta.unbind(), self.units.widen(beta)
        if scales.constant is not None and self.bias_scale is not None:
            self.bias_scale = self.bias_scale * self.units.widen(scales.constant)
        if scales.alpha is None or scales.mu is None or scales.spread is None or scales.fresh is None:
            self.columns = Columns(scale=() if beta is None else betas)
            return
        one_by_one = self.coordinates.beta_per_output or not self.layers.biased
        scale = scales.alpha if beta is None or one_by_one else self._with_beta(scales.alpha, beta)
        columns = self._columns([scales.mu, scale, scales.spread, scales.fresh], self.on_host)
        if any(group is not None for group in self.group_of):
            columns = [self._by_row(each) for each in columns]
        self.columns = Columns(*columns)
        if one_by_one:
            of_blocks = zip(self.columns.mu, self.columns.scale, betas, strict=True)
            self.scales = [Scales(mu, alpha, beta=own) for mu, alpha, own in of_blocks]

    def _with_beta(self, alpha: Tensor, beta: Tensor) -> Tensor:
        """α β of each input, β of its layer."""
        scale: Tensor = alpha * self.layers.inputs.widen(beta)
        return scale

    def _columns(self, packed: Sequence[Tensor], keep: bool = False) -> list[Sequence[Tensor]]:
        """Packed tensors per input as tensors per column, of each block; with `keep` they last until the next time."""
        every, out = torch.stack(list(packed)), self.of_columns if keep else None
        if self.input_of is not None:
            every = torch.index_select(every, 1, self.input_of, out=out)
        elif out is not None:
            out.copy_(every)
        return self.column_parts if keep else self._split(every)

    def _by_row(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Columns of blocks in groups as [unit, column]: each unit has inputs of its own."""
        parts = zip(self.blocks, columns, self.group_of, strict=True)
        return [x if group is None else x.view(b.groups, -1)[group] for b, x, group in parts]

    def column_scales(self) -> Sequence[Tensor | None]:
        """α β of each column of the blocks' whole matrices, whatever rows this rank has."""
        alpha, beta = self.packed.alpha, self.packed.beta
        if alpha is None:
            return [None] * len(self.blocks)
        scale = alpha if beta is None else self._with_beta(alpha, beta)
        return [x.view(b.groups, -1) for b, x in zip(self.blocks, self._columns([scale])[0], strict=True)]

    def constant_sizes(self) -> Tensor:
        """√(1 + mean μ²) of each block."""
        if self.packed.constant is None or self.packed.beta is None:
            return super().constant_sizes()
        return self.packed.constant * self.packed.beta

    def _own_outputs(self, flat: Tensor) -> list[Tensor]:
        """A packed tensor per output as [unit] of each block: the rows this rank has."""
        parts = zip(self.blocks, torch.split_with_sizes(flat, self.layers.outputs.sizes), strict=True)
        return [dtensor.part(part, b.weight) if dtensor.sharded(b.weight) else part for b, part in parts]

    def _scaled(self, weights: list[Tensor], own: bool) -> list[Tensor]:
        """α β of each weight: a gradient or a step, between w and v; in place if the memory is our `own`."""
        factors = self.columns.scale
        return list((foreach.mul_ if own else foreach.mul)(weights, factors)) if factors else weights

    def held_addresses(self) -> list[int]:
        """None: this step is not replayed."""
        return []

    # the step

    def move(self, ok: Tensor | None) -> None:
        """Take the direction on v back to w, hold every unit to its trust radius, and move the parameters."""
        weights, biases, scale, own = self.direction
        self.on_v, self.direction = OnV([], []), Direction([], [])
        back = scaled if self.layers.biased else step_to_w_biasless
        steps = [*map(back, weights, self.scales)] if self.scales else self._scaled(weights, own)
        del weights
        along = self.along(steps, self.columns.mu) if self.columns.mu else None
        gain, biases = self._rated(biases, scale)
        factor = self._trust(steps, along, gain, biases) if self.stages else None
        if factor is not None:
            gain, biases = gain * factor, [bias * factor for bias in biases]
        if biases and along is not None:
            mean = gain * along
            biases = [bias - mean for bias in biases]
        if isinstance(gain, Tensor):  # a step may be a gradient, or a momentum buffer
            multiply = foreach.mul if along is None else foreach.mul_
            steps, gain = list(multiply(steps, self.rows(gain) if gain.dim() else [gain] * len(steps))), 1.0
        self._displace(self.as_parameters(OnV(steps, biases)), gain, ok)

    def _rated(self, biases: list[Tensor], scale: Tensor | None) -> tuple[Any, list[Tensor]]:
        """How far each unit goes along its direction, stepsize and the rule's scale; and the steps of biases on v."""
        rates: list[Any]
        if self.rule.own_rate:
            gain, rates = -1.0, [-1.0] * len(biases)
        else:
            # those of the first block stand for all, if they share one group
            few = self.blocks[:1] if len(self.groups) == 1 else self.blocks
            gain, *rates = (self._common(column) for column in zip(*(b.rates() for b in few), strict=True))
        all_gain = gain if scale is None else gain * scale
        if scale is not None:
            rates = [all_gain if rate is gain else rate * scale for rate in rates]
        if self.bias_scale is not None:
            rates = [rate * self.bias_scale for rate in rates]
        return all_gain, [bias * rate for bias, rate in zip(biases, rates, strict=True)]

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
        step2 = gain * gain * self.stretch(steps, self.columns.fresh)
        if biases:
            longest = biases[0] if len(biases) == 1 else torch.stack(biases).abs().amax(0)
            step2 = torch.addcmul(step2, longest, longest)
        elif along is not None:
            step2 = step2 + (gain * along).square()
        unit2 = self.unit_length2().clamp(min=guards.TRUST_FLOOR**2)
        relative2 = step2 / unit2
        largest2 = self.units.most(relative2)
        if self.on_host and guards.cannot_fire(max(largest2.tolist()), self.group, self.rule.linear):
            self._count(raised, none, largest2.sqrt())
            return None
        typical2 = None if self.rule.linear else guards.typical(relative2, self.units)
        factor, over = guards.trust_factor(unit2, step2, self.group, typical2)
        self._count(raised, self.units.total(over.to(factor.dtype)), largest2.sqrt())
        return factor

    def _count(self, raised: Tensor, held: Tensor, largest: Tensor) -> None:
        """Count on the device what the guards did."""
        rows = torch.stack([raised, held, largest, raised, held, self.each], 1).view(-1, 3).unbind()
        foreach.copy_([s.last for s in self.stages], rows[0::2])
        foreach.add_([s.fired for s in self.stages], rows[1::2])

    def _displace(self, steps: list[Tensor], gain: Any, ok: Tensor | None) -> None:
        """p ← (1 − lr · weight_decay) p − step, or nothing where the mask says so; steps of weights are times `gain`.

        Departs from §4.2, where L2 is a term of the loss: the decay is decoupled, on w.
        """
        params, count = self.own(self.parameters), len(self.blocks)
        if any(group["weight_decay"] for group in self.groups):
            columns = zip(*(zip(b.rates(), b.param_groups, strict=True) for b in self.blocks), strict=True)
            for p, (rate, group) in zip(params, (pair for column in columns for pair in column), strict=True):
                shrink = rate * group["weight_decay"]
                p.mul_(1 - (shrink if ok is None else torch.where(ok, shrink, 0.0)))
        if ok is not None:
            steps = [torch.where(ok, s, 0) for s in steps]
        if gain == 1:
            foreach.add_(params, steps, alpha=-1.0)
        else:
            foreach.add_(params[:count], steps[:count], alpha=-gain)
            foreach.add_(params[count:], steps[count:], alpha=-1.0)

    # after the step

    def commit(self, ok: Tensor | None) -> None:
        """Let the batch join the moments, and the next one be summed about the running mean."""
        after, complete = self.coordinates.after(self.kept, self.batch, self.layers), self.batch.complete
        more: list[tuple[list[Tensor], Tensor]] = []
        self.write(after)
        self.committed = self.tallies if self.on_host else None
        if "mx" in after:
            mx, mass = after["mx"], after["mass"]
            if not complete:  # some layers may have no moments yet
                if ok is not None:
                    mx, mass = (torch.where(ok, after[name], self.kept[name]) for name in ("mx", "mass"))
                mx = torch.where(self.layers.inputs.widen(mass > 0), mx, torch.nan)
            more.append(([s.centre for s in self.stages], mx))
            for stage in self.stages if complete else ():
                stage.settled = True
        self.flush(ok, more)
        self._release()
