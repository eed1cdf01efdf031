"""Side streams, for pieces of a CUDA graph that do not depend on each other."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

COUNT = 4


@contextmanager
def lanes(device: torch.device) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
    """A context for each number: work in contexts of several numbers may overlap, and ends with this one.

    Nothing overlaps outside of graphs: there the host launches small kernels more slowly than they run.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield lambda number: nullcontext()
        return
    main = torch.cuda.current_stream(device)
    streams = [main]
    streams += [torch.cuda.Stream(device) for _ in range(COUNT - 1)]  # type: ignore[no-untyped-call]
    for stream in streams[1:]:
        stream.wait_stream(main)
    yield lambda number: torch.cuda.stream(streams[number % COUNT])
    for stream in streams[1:]:
        main.wait_stream(stream)
