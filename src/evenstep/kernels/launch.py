"""Launch Triton kernels at little cost to the host.

Triton looks at every argument at every launch to find the right build, which takes longer than most of these kernels
run. What the choice depends on is known here: a caller names it in a key, and from the second launch with the same key
on the build is called directly.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


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
