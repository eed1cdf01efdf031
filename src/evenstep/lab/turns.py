"""Several trainings at once on one GPU: a step of each in turn from one thread, each on a CUDA stream of its own.

The step of a small network is a long chain of small kernels, which leaves a GPU mostly idle: several such chains side
by side take little longer than one.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")
Work = Generator[None, None, T]
"""Something done in steps: it yields after each of them, never inside a stream's context, and returns what came out."""


def in_turn(works: Iterable[Work[T]], device: torch.device | str, at_once: int) -> Iterator[T]:
    """What each of `works` returns, as soon as it ends; up to `at_once` of them are under way, the next is taken then.

    One that raises stops no other: the first such exception is raised when all the others have ended. Whatever
    `works` use must have been made on the current stream, or on the host.
    """
    waiting, failed = iter(works), list[Exception]()
    turns = deque(zip(_streams(torch.device(device), at_once), waiting, strict=False))
    while turns:
        stream, work = turns.popleft()
        ended: list[T] = []
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                next(work)
        except StopIteration as end:
            ended.append(end.value)
        except Exception as error:
            failed.append(error)
        else:
            turns.append((stream, work))
            continue
        yield from ended
        following = next(waiting, None)
        if following is not None:
            turns.append((stream, following))
    if failed:
        raise failed[0]


def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream | None]:
    """New streams on a GPU, which wait for what was under way; elsewhere there are none."""
    if device.type != "cuda":
        return [None] * count
    streams = [torch.cuda.Stream(device) for _ in range(count)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    return list(streams)
