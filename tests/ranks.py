"""Processes that train one network over gloo, and what each of them returns."""

import os
import time
import traceback
import warnings
from datetime import timedelta
from unittest import mock

import torch
from torch import distributed as dist
from torch import multiprocessing

LIMIT = 240  # seconds after which a job is taken to hang


def run(folder, world, jobs):
    """What `jobs`, a list of (function, arguments), return in a group of `world` processes: one list per rank.

    A job that raises gives its traceback as a string. Arguments and results go through files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(jobs, folder / "jobs.pt")
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        context = multiprocessing.spawn(_main, (world, folder), nprocs=world, join=False)
    end = time.monotonic() + LIMIT
    while not context.join(timeout=5):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{world} processes did not end within {LIMIT} s")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _main(rank, world, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    results = []
    for function, arguments in torch.load(folder / "jobs.pt", weights_only=False):
        torch.manual_seed(0)
        try:
            results.append(function(*arguments))
        except Exception:
            results.append(traceback.format_exc())
        torch.save(results, folder / f"{rank}.pt")
    dist.barrier()  # a rank that leaves while another still connects a group of them breaks it
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process that takes itself apart


def rank():
    return dist.get_rank()


def share(batch):
    """This rank's part of a batch that is the same on all ranks."""
    return batch.tensor_split(dist.get_world_size())[rank()]


def gathered(tensor):
    """A tensor of every rank."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.detach().contiguous())
    return found
