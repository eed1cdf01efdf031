"""Training steps as CUDA graphs: what a small network's step costs on a GPU is mostly its launches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WARM_UP = 3  # calls made eagerly before a graph is captured: state is made, libraries choose their algorithms

Compute = Callable[[Tensor, Tensor], None]


class Steps:
    """`compute(x, y)`; on a GPU as a CUDA graph for each shape of `x`, on a stream that is not the default one."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.graphs: dict[torch.Size, Captured] = {}

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """One call, on the current stream."""
        if not x.is_cuda:
            self.compute(x, y)
            return
        if x.shape not in self.graphs:
            self.graphs[x.shape] = Captured(self.compute, x, y)
        self.graphs[x.shape](x, y)


class Captured:
    """`compute(x, y)` for inputs of one shape, which are copied to tensors that stay in place.

    Eager at first, then captured, then replayed. While it is eager the device does nothing else: trainings share the
    streams of parallel branches, and libraries time their algorithms.
    """

    def __init__(self, compute: Compute, x: Tensor, y: Tensor) -> None:
        """`x` and `y` give the shapes."""
        self.compute, self.x, self.y = compute, torch.empty_like(x), torch.empty_like(y)
        self.graph, self.calls = torch.cuda.CUDAGraph(), 0

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """One call, on the current stream."""
        self.x.copy_(x)
        self.y.copy_(y)
        if self.calls < WARM_UP:
            torch.cuda.synchronize()
            self.compute(self.x, self.y)
            torch.cuda.synchronize()
        elif self.calls == WARM_UP:
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.compute(self.x, self.y)
        if self.calls >= WARM_UP:
            self.graph.replay()
        self.calls += 1


@contextmanager
def own_stream(device: torch.device | str) -> Iterator[None]:
    """A stream of our own on a GPU, which first waits for what was under way; nothing elsewhere."""
    if torch.device(device).type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
