"""One training over several processes, as torchrun starts them: each takes its share of every batch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def joined(device: torch.device | str) -> Iterator[torch.device]:
    """Join the processes that torchrun started (WORLD_SIZE > 1), if it did; yields the device of this process."""
    device = torch.device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        distributed.destroy_process_group()


def size() -> int:
    """The number of processes that train together; 1 if none were joined."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """The rank of this process; rank 0 writes the records."""
    return distributed.get_rank() if size() > 1 else 0


def wrapped(model: nn.Module, device: torch.device | str) -> nn.Module:
    """`model`, with gradients averaged over the processes in every backward pass."""
    if size() == 1:
        return model
    device = torch.device(device)
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def share(batch: Tensor) -> Tensor:
    """This process's part of a batch that all processes have drawn."""
    return batch.tensor_split(size())[rank()]


def mean(value: Tensor) -> Tensor:
    """The mean of `value` over the processes, detached."""
    value = value.detach()
    if size() > 1:
        value = value.clone()
        distributed.all_reduce(value)
    return value / size()
