"""Record GPU work once, and replay it as one CUDA graph.

The host launches hundreds of small kernels more slowly than the device runs them.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .launch import on

WARM_UP = 3  # calls before work is recorded: state is made, kernels are built, libraries choose their algorithms


class Replay:
    """Work on one device that does the same in every call, as long as it finds its tensors where they were."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mask = torch.ones((), dtype=torch.bool, device=device)  # where the recorded work reads it
        self.graph: torch.cuda.CUDAGraph | None = None
        self.memory: Sequence[int] = ()
        self.calls = 0

    def __call__(self, memory: Sequence[int], mask: Tensor | None, work: Callable[[Tensor | None], None]) -> None:
        """Do `work(mask)`: eagerly for the first calls with tensors at the addresses `memory`, then by replaying it.

        Work of other addresses is recorded anew. Inside a graph of the user's it is recorded there.
        """
        with on(self.device):
            if torch.cuda.is_current_stream_capturing():
                return work(mask)
            if memory != self.memory:
                self.memory, self.graph, self.calls = memory, None, 0
            self.calls += 1
            if self.calls <= WARM_UP:
                return work(mask)
            if mask is None:
                self.mask.fill_(True)
            else:
                self.mask.copy_(mask)
            if self.graph is None:
                self.graph = recorded(lambda: work(self.mask))
            self.graph.replay()


def recorded(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The graph of all that `work` launches, none of which runs."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with without_garbage_collection(), torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the device
        try:
            work()
        finally:
            graph.capture_end()
    return graph


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """No cyclic garbage is freed in here: another graph among it would invalidate the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
