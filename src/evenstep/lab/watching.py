"""What a batch shows of a network's layers, returned as values: under `torch.func` a hook cannot keep what it sees."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..math.moments import Sums, add_zeros, sum_about, thinned
from ..model.kinds import Look
from ..model.survey import Entry
from ..statistics.batch import LayerStatistics


class Seen(NamedTuple):
    """What one batch showed of a layer: Σ(x − centre), Σ(x − centre)² and Σ ĝ² (no units where that is not wanted)."""

    centre: Tensor
    first: Tensor
    second: Tensor
    g2: Tensor


class Shown(LayerStatistics):
    """A stage made of values, for the functions that read one."""

    def __init__(self, seen: Seen, tally: Tensor, stuffed: bool) -> None:
        """Of one member, or under `vmap` of all."""
        self.centre, self.first, self.second, self.g2 = seen
        self._tally, self.pending = tally, None
        self.inputs, self.units, self.stuffed = self.centre.numel(), self.g2.numel(), stuffed

    def sums(self) -> Sums:
        """The batch, with the zeros that the layer inserts."""
        sums = Sums(self.rows, self.first, self.second)
        return add_zeros(sums, self.zeros, self.centre) if self.stuffed else sums


@dataclass
class Forward:
    """One forward pass: the centres it sums about, what it has seen, and the probes added to outputs, by entry."""

    centres: Sequence[Tensor]
    probes: Iterator[Tensor] | None = None
    sums: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    counts: dict[int, list[int]] = field(default_factory=dict)
    outputs: list[tuple[int, int, torch.Size]] = field(default_factory=list)


class Watcher:
    """Hooks on the layers of a model; they act only inside `forward`, and only on values.

    `inputs` and `gradients` say whether the inputs' sums and the squared gradients are wanted. A gradient is read by
    adding a probe, a tensor of zeros, to a layer's output: the loss's gradient with respect to it is ĝ.
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Iterable[Entry],
        *,
        inputs: bool,
        gradients: bool,
        rows: Callable[[Entry], int | None] = lambda entry: None,
    ) -> None:
        """Watch every place of `entries`; the model keeps the hooks, so give a copy that serves nothing else.

        `rows(entry)` bounds how many rows of a call are looked at.
        """
        self.entries, self.inputs, self.gradients = list(entries), inputs, gradients
        self.limits = [rows(entry) for entry in self.entries]
        self.pass_: Forward | None = None
        places: dict[nn.Module, dict[str, int]] = {}
        for k, entry in enumerate(self.entries):
            for _, module in entry.places:
                places.setdefault(module, {})[entry.slot.weight] = k
        for module, found in places.items():
            module.register_forward_hook(self._hook(found), with_kwargs=True)

    def _hook(self, found: dict[str, int]) -> Any:
        first = self.entries[next(iter(found.values()))]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
            if self.pass_ is None:
                return None
            looks = first.kind.look(module, args, kwargs, output, first.batch_dim)
            slots = first.kind.slots(module)
            for slot, look in zip(slots, looks, strict=True):
                if look is not None and slot.weight in found:
                    self._see(self.pass_, found[slot.weight], look)
            k = found.get(slots[0].weight)
            if not self.gradients or k is None or not self.entries[k].slot.output_visible:
                return None
            self.pass_.outputs.append((k, first.kind.units_dim(output), output.shape))
            return None if self.pass_.probes is None else output + next(self.pass_.probes)

        return hook

    def _see(self, now: Forward, k: int, look: Look) -> None:
        """Add one call; repeated calls within a forward show the same examples again."""
        x = None if look.x is None or not self.inputs else thinned(look.x.detach(), look.dim, self.limits[k])
        rows = 0 if x is None else x.numel() // x.shape[look.dim]
        before = now.counts.get(k, [0, 0, 0, look.examples])
        now.counts[k] = [before[0] + rows, before[1] + look.zeros, before[2] + look.applied, before[3]]
        if not rows or x is None:
            return
        with torch.no_grad():
            centre, first, second = now.sums.get(k, (now.centres[k], 0.0, 0.0))
            if k not in now.sums:
                row = x.movedim(look.dim, -1)[(0,) * (x.dim() - 1)].to(centre.dtype)
                centre = torch.where(centre.isnan(), row, centre)
            added = sum_about(x, centre, look.dim)
            now.sums[k] = centre, first + added[0], second + added[1]

    @contextmanager
    def forward(self, centres: Sequence[Tensor], probes: Iterable[Tensor] | None = None) -> Iterator[Forward]:
        """Watch one forward pass of the model."""
        self.pass_ = Forward(centres, None if probes is None else iter(probes))
        try:
            yield self.pass_
        finally:
            self.pass_ = None

    def seen(self, now: Forward, probe_grads: Sequence[Tensor]) -> list[Seen]:
        """What the pass showed of each entry; `probe_grads` are the gradients at the probes, in their order."""
        g2: dict[int, Tensor] = {}
        for (k, dim, _), grad in zip(now.outputs, probe_grads, strict=bool(probe_grads)):
            added = sum_about(grad, now.centres[k].new_zeros(()), dim)[1]
            g2[k] = g2[k] + added if k in g2 else added
        empty = [centre.new_zeros(0) for centre in now.centres]
        nothing = [(c, torch.zeros_like(c), torch.zeros_like(c)) for c in now.centres]
        return [Seen(*now.sums.get(k, nothing[k]), g2.get(k, empty[k])) for k in range(len(self.entries))]

    def tallies(self, now: Forward) -> list[Tensor]:
        """A stage's tally of each entry, from the shapes of the pass."""
        counts = [now.counts.get(k, [0] * 4) for k in range(len(self.entries))]
        pairs = zip(now.centres, counts, strict=True)
        return [torch.stack([centre.new_full((), n) for n in numbers]) for centre, numbers in pairs]
