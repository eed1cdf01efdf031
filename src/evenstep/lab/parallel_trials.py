"""Trials side by side on one GPU: ordinary models and optimizers, each training step a CUDA graph on its own stream.

The step of a small network is a chain of short kernels: launching them takes longer than running them, and one chain
leaves most of the GPU idle. A graph launches the whole chain at once, and graphs on different streams overlap. On a CPU
the same code runs the trials one after the other, eagerly, with the same arithmetic.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels.replay import without_garbage_collection

WARM_UP = 3  # eager calls before capture: optimizer state is created, libraries choose their algorithms
AT_ONCE = {"cuda": 24}  # trials side by side, by device type; one elsewhere

T = TypeVar("T")
Work = Generator[None, None, T]
"""A computation in steps: it yields after each step and returns its result."""


class CapturedStep:
    """`step(x, y)` as one CUDA graph for each shape of `x`; call it on a side stream (see `side_stream`)."""

    def __init__(self, step: Callable[[Tensor, Tensor], None]) -> None:
        self.step = step
        self.graphs: dict[torch.Size, _Graph] = {}

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Run one step on the current stream."""
        if x.shape not in self.graphs:
            self.graphs[x.shape] = _Graph(self.step, x, y)
        self.graphs[x.shape].run(x, y)


class _Graph:
    """The step for inputs of one shape: eager while it warms up, then captured, then replayed."""

    def __init__(self, step: Callable[[Tensor, Tensor], None], x: Tensor, y: Tensor) -> None:
        self.step = step
        self.x, self.y = torch.empty_like(x), torch.empty_like(y)  # the addresses that the graph reads
        self.graph, self.calls = torch.cuda.CUDAGraph(), 0

    def run(self, x: Tensor, y: Tensor) -> None:
        self.x.copy_(x)
        self.y.copy_(y)
        if self.calls < WARM_UP:
            torch.cuda.synchronize()  # libraries time their algorithms here: nothing else may use the GPU
            self.step(self.x, self.y)
            torch.cuda.synchronize()
        elif self.calls == WARM_UP:
            # thread_local: a progress bar's or a heartbeat's thread must not invalidate the capture
            stream = torch.cuda.current_stream()
            with (
                without_garbage_collection(),
                torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"),
            ):
                self.step(self.x, self.y)
        if self.calls >= WARM_UP:
            self.graph.replay()  # capture records the step without running it
        self.calls += 1


def round_robin(works: Iterable[Work[T]], device: torch.device | str, at_once: int | None = None) -> Iterator[T]:
    """Advance up to `at_once` works in turn, one step each, and yield each result as soon as its work ends.

    On a GPU every work runs on a stream of its own. A work that raises stops no other: its exception is raised after
    the others have ended. If `works` itself raises, no further work begins, and its exception waits in the same way.
    """
    device = torch.device(device)
    free = deque(side_stream(device) for _ in range(at_once or AT_ONCE.get(device.type, 1)))
    waiting, failed = iter(works), list[Exception]()
    active = deque[tuple[AbstractContextManager, Work[T]]]()
    while True:
        while free and (work := _next(waiting, failed)) is not None:
            active.append((free.popleft(), work))
        if not active:
            break
        stream, work = active.popleft()
        results: list[T] = []
        try:
            with stream:
                next(work)
            active.append((stream, work))
        except StopIteration as end:
            results.append(end.value)
            free.append(stream)
        except Exception as error:
            failed.append(error)
            free.append(stream)
        yield from results
    if failed:
        raise failed[0]


def _next(waiting: Iterator[Work[T]], failed: list[Exception]) -> Work[T] | None:
    """The next work; None if there is none, or the iterator failed."""
    try:
        return next(waiting, None)
    except Exception as error:
        failed.append(error)
        return None


def side_stream(device: torch.device | str) -> AbstractContextManager:
    """A new stream of the GPU as a reusable context, ordered after all work queued so far; no effect on a CPU.

    Capture is impossible on the default stream.
    """
    if torch.device(device).type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
