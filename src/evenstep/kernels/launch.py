"""Launch Triton kernels at little cost to the host.

Triton looks at every argument at every launch to find the right build, which takes longer than most of these kernels
run. What the choice depends on is known here: a caller names it in a key, and from the second launch with the same key
on the build is called directly.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Where kernels on tensors of this device are launched: Triton takes the current device, whatever they are on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


class Launcher:
    """A kernel and its builds by key."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.builds: dict[Hashable, Any] = {}

    def __call__(
        self, key: Hashable, grid: tuple[int, int, int], arguments: tuple[Any, ...], warps: int, **constants: Any
    ) -> None:
        """Launch with `arguments` and then `constants`, both in the kernel's order.

        `key` must tell apart whatever makes Triton build anew beside the constants: device, dtypes, alignment.
        """
        full = (key, warps, *constants.values())
        build = self.builds.get(full)
        if build is not None:
            build[grid](*arguments, *constants.values())
            return
        build = self.kernel[grid](*arguments, **constants, num_warps=warps)
        if hasattr(build, "packed_metadata"):  # Triton's interpreter builds nothing
            self.builds[full] = build


COPIES = 16  # pinned copies of a table: half of them in turn, the others for captured graphs


class HostTable:
    """A table that the host writes and the device reads, sent when it has changed, without waiting."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pinned = torch.zeros(COPIES, rows, columns, dtype=dtype).pin_memory()
        self.there = torch.zeros(rows, columns, dtype=dtype, device=device)
        self.last: Any = None
        self.turn, self.captured = 0, COPIES // 2
        self.sent = [torch.cuda.Event() for _ in range(COPIES // 2)]  # type: ignore[no-untyped-call]

    def send(self, now: Any, make: Callable[[], list[list[Any]]]) -> Tensor:
        """The table on the device: what `make` gives, made and sent again when `now` is not what it was."""
        if torch.cuda.is_current_stream_capturing():
            if self.captured == COPIES:
                raise RuntimeError("this optimizer's step is in too many CUDA graphs; build a new optimizer for more.")
            self.pinned[self.captured].copy_(torch.tensor(make(), dtype=self.pinned.dtype))
            self.there.copy_(self.pinned[self.captured], non_blocking=True)
            self.captured, self.last = self.captured + 1, None
        elif now != self.last or self.captured > COPIES // 2:  # replays of graphs write the table, too
            self.last = None  # until it is sent: an error on the way must not pass for a table that is there
            copy = self.turn
            self.turn = (self.turn + 1) % len(self.sent)
            self.sent[copy].synchronize()  # it was sent eight changes ago
            self.pinned[copy].copy_(torch.tensor(make(), dtype=self.pinned.dtype))
            self.there.copy_(self.pinned[copy], non_blocking=True)
            self.sent[copy].record()
            self.last = now
        return self.there
