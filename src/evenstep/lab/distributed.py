"""One training over several processes, as torchrun starts them: each takes its share of every batch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def joined(device: torch.device | str) -> Iterator[torch.device]:
    """Join the processes that torchrun started, if it did (WORLD_SIZE > 1); gives the device this one is to use."""
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
    """How many processes train together; 1 if none were joined."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """The number of this process among them; 0 is the one that records."""
    return distributed.get_rank() if size() > 1 else 0


def wrapped(model: nn.Module, device: torch.device | str) -> nn.Module:
    """`model` with its gradients averaged over the processes in every backward pass."""
    if size() == 1:
        return model
    device = torch.device(device)
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def share(batch: Tensor) -> Tensor:
    """This process's part of a batch that all of them have drawn alike."""
    return batch.tensor_split(size())[rank()]


def mean(value: Tensor) -> Tensor:
    """The mean of `value` over the processes, without its history."""
    value = value.detach()
    if size() > 1:
        value = value.clone()
        distributed.all_reduce(value)
    return value / size()
