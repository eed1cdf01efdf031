"""Many members of one network in one program: parameters stacked, one step for all of them.

Members differ in stepsize, weights and buffers alone. One that diverges is frozen, and never touches another.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from ..torch_optimizer.coordinate_optimizer import CoordinateOptimizer
from .data import Arrays, Text
from .evaluate import evaluate_members
from .stacked import Build, Stack, StackedCoordinates, StackedRule, along
from .watching import Seen

STREAMS = 8  # branches of a captured step in which members take turns
FORWARDS = ("each", "vmap")
Found = tuple[Stack, Tensor, list[Seen]]  # gradients, losses, and what the layers saw


class Ensemble:
    """E members in training.

    `forward` is how their gradients are found: "each" runs the members' networks one after the other (on a GPU as
    parallel branches of one graph), "vmap" all at once, with convolutions grouped by member. The optimizer's arithmetic
    is the same for both.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        build: Build,
        rates: Sequence[float],
        *,
        source: Sequence[int] | None = None,
        forward: str = "each",
    ) -> None:
        """One model per member, alike but for their weights; `build(model, lr=…)` makes the public optimizer.

        A step is given one or more batches; member e takes the one numbered `source[e]`, the first if None.
        """
        if forward not in FORWARDS:
            raise ValueError(f"forward must be one of {', '.join(FORWARDS)}; got {forward!r}.")
        self.forward, self.members = forward, len(models)
        self.source = list(source or [0] * len(models))
        self.params = stack([dict(model.named_parameters()) for model in models])
        self.buffers = stack([dict(model.named_buffers()) for model in models])
        like = next(iter(self.params.values()))
        self.rates = torch.tensor(rates, dtype=like.dtype, device=like.device)
        self.full_rates, self.total = self.rates.clone(), torch.zeros_like(self.rates)
        self.alive = torch.ones(len(models), dtype=torch.bool, device=like.device)
        self.which = torch.tensor(self.source, device=like.device)
        self.sample, self.model = copy.deepcopy(models[0]).eval(), copy.deepcopy(models[0]).train()
        optimizer = build(self.model, lr=rates[0])
        self.stacked: StackedCoordinates | StackedRule
        if isinstance(optimizer, CoordinateOptimizer):
            self.stacked = StackedCoordinates(self.model, optimizer, self.params, self.rates)
        else:
            self.stacked = StackedRule(self.model, build, self.params, self.rates)
        self.shapes: dict[torch.Size, tuple[list[Tensor], list[torch.Size]]] = {}
        self.streams = branches(like.device) if like.is_cuda and forward == "each" else []

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor) -> None:
        """One step of all members on the batches `x` and `y`, [batch, example, ...]; the losses join `total`."""
        if x.shape[1:] not in self.shapes:
            self.shapes[x.shape[1:]] = self._measure(x[0])
        tallies, _ = self.shapes[x.shape[1:]]
        before = {name: buffer.clone() for name, buffer in self.buffers.items()}
        grads, losses, seen = self._each(x, y) if self.forward == "each" else self._all(x, y)
        for name, buffer in self.buffers.items():
            buffer.copy_(torch.where(along(self.alive, buffer), buffer, before[name]))
        self.total += losses * y.shape[1]
        self.stacked.step(grads, seen, tallies, self.alive)

    def scale_rates(self, factor: float) -> None:
        """Set every member's stepsize to `factor` times its full one."""
        torch.mul(self.full_rates, factor, out=self.rates)

    def freeze_diverged(self) -> None:
        """Let members whose total is no longer finite rest from now on."""
        self.alive &= self.total.isfinite()

    def scores(self, data: Arrays | Text) -> list[dict[str, float]]:
        """What `evaluate.evaluate` gives for each member."""
        members = {**self.params, **self.buffers}
        return evaluate_members(self.sample, members, data, at_once=self.forward == "vmap")

    def member(self, e: int) -> nn.Module:
        """Member `e` as a module in eval mode: always the same one, with other weights."""
        self.sample.load_state_dict({n: t[e] for n, t in {**self.params, **self.buffers}.items()}, strict=False)
        return self.sample

    def _measure(self, x: Tensor) -> tuple[list[Tensor], list[torch.Size]]:
        """What a batch's shape says: tallies of the layers, and shapes of the probes."""
        watcher, buffers = self.stacked.watcher, {name: buffer[0].clone() for name, buffer in self.buffers.items()}
        with watcher.forward([centre[0] for centre in self.stacked.centres]) as now:
            functional_call(self.model, buffers, (x,))
        return watcher.tallies(now), [shape for _, _, shape in now.outputs]

    def _one(
        self, transform: Callable, params: Stack, buffers: Stack, centres: list[Tensor], x: Tensor, y: Tensor
    ) -> Found:
        """Gradients, loss and what the layers saw, of one member; `transform` differentiates as `torch.func.grad`."""
        watcher, passes = self.stacked.watcher, []

        def loss_of(params: Stack, probes: list[Tensor], buffers: Stack) -> tuple[Tensor, Any]:
            with watcher.forward(centres, probes) as now:
                output = functional_call(self.model, (params, buffers), (x,))
            passes.append(now)
            loss = functional.cross_entropy(output.flatten(0, -2), y.flatten())
            return loss, (loss.detach(), now.sums)

        _, shapes = self.shapes[x.shape]
        probes = [torch.zeros(shape, dtype=self.rates.dtype, device=x.device) for shape in shapes]
        (grads, at_probes), (loss, sums) = transform(loss_of, argnums=(0, 1), has_aux=True)(params, probes, buffers)
        return grads, loss, watcher.seen(replace(passes[0], sums=sums), at_probes)

    def _each(self, x: Tensor, y: Tensor) -> Found:
        """The members one after the other; on a GPU in branches that a graph runs side by side."""
        centres, results = self.stacked.centres, []
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        for e, source in enumerate(self.source):
            with torch.cuda.stream(self.streams[e % STREAMS]) if self.streams else nullcontext():
                params, buffers = ({n: t[e] for n, t in group.items()} for group in (self.params, self.buffers))
                mine = [centre[e] for centre in centres]
                results.append(self._one(by_autograd, params, buffers, mine, x[source], y[source]))
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        grads, losses, seen = zip(*results, strict=True)
        shown = [Seen(*map(torch.stack, zip(*entry, strict=True))) for entry in zip(*seen, strict=True)]
        return stack(grads), torch.stack(losses), shown

    def _all(self, x: Tensor, y: Tensor) -> Found:
        """All members at once; a batch that serves all of them is not copied."""
        one = len(x) == 1
        x, y = (x[0], y[0]) if one else (x[self.which], y[self.which])
        batch = None if one else 0
        each = vmap(partial(self._one, grad), in_dims=(0, 0, 0, batch, batch))
        return each(self.params, self.buffers, self.stacked.centres, x, y)


@functools.cache
def branches(device: torch.device) -> list[torch.cuda.Stream]:
    """The streams on which members take turns, the same for all ensembles: torch has 32 in all."""
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]


def stack(parts: Sequence[Mapping[str, Tensor]]) -> Stack:
    """Tensors of the same name stacked, without their history."""
    return {name: torch.stack([part[name].detach() for part in parts]) for name in parts[0]}


def by_autograd(loss_of: Callable, argnums: tuple[int, int], has_aux: bool) -> Callable:
    """`torch.func.grad` for one member at a time by plain autograd, which is a fifth faster on a CPU."""

    @torch.enable_grad()
    def run(params: Stack, probes: list[Tensor], buffers: Stack) -> tuple:
        params = {name: p.detach().requires_grad_() for name, p in params.items()}
        probes = [probe.requires_grad_() for probe in probes]
        loss, aux = loss_of(params, probes, buffers)
        found = torch.autograd.grad(loss, [*params.values(), *probes])
        return (dict(zip(params, found, strict=False)), list(found[len(params) :])), aux

    return run
