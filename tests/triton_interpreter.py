"""Triton's kernels on the CPU, by its interpreter: run with TRITON_INTERPRET=1 in a process of their own.

Its argument `steps NAME` holds the step kernels to the loop over blocks, `moments` the moments kernel to float64,
`ranks` two processes that share matrices to one.
"""

import itertools
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps

import evenstep
import helpers
import ranks
import test_shared_matrices
from evenstep.kernels import input_sums as moments
from evenstep.math.moments import thinned
from evenstep.model.layer_kind import Look
from evenstep.statistics.layer_statistics import LayerStatistics
from evenstep.step.triton import tables, triton_step


def with_bools(name, place):
    """Triton 3.9's interpreter wants bools for a mask, and makes numbers of a bool that it combines with another."""
    plain = getattr(InterpreterBuilder, name)

    def masked(self, *arguments):
        mask = arguments[place]
        mask.data = mask.data.astype(bool)
        return plain(self, *arguments)

    setattr(InterpreterBuilder, name, masked)


def by_halves(self, given):
    """A reduction by a kernel's own function, of half the numbers with the other half: not one number at a time."""
    found = [tensor.handle.data for tensor in given]
    while (size := found[0].shape[self.axis]) > 1:
        assert size % 2 == 0
        halves = [np.split(data, 2, self.axis) for data in found]
        both = [[self.to_tensor(half[k], t.dtype) for half, t in zip(halves, given, strict=True)] for k in (0, 1)]
        added = self.combine_fn.fn(*both[0], *both[1])
        found = [t.handle.data.reshape(half[0].shape) for t, half in zip(added, halves, strict=True)]
    return [self.to_tensor(data.squeeze(self.axis), t.dtype) for data, t in zip(found, given, strict=True)]


class Direct:
    """A table that needs no sending."""

    def __init__(self, rows, columns, dtype, device):
        self.dtype, self.there = dtype, torch.zeros(rows, columns, dtype=dtype)

    def send(self, now, make):
        self.there.copy_(torch.tensor(make(), dtype=self.dtype))  # which captured views of it see, as on a GPU
        return self.there


def steps(name):
    """Compare steps by the kernels with torch's, block by block."""
    count, look = 0, triton_step.TritonStep.look

    def counted(self, divisor=None):
        nonlocal count
        count += 1
        look(self, divisor)

    triton_step.TritonStep.look = counted
    agree = helpers.assert_steps_agree
    torch.manual_seed(3)
    agree(name, helpers.Net(), "cpu", 1e-3, steps=3, poison=(1,))
    triton_step.LAUNCH["measure"] = 1, 16  # so that several programs share the embedding
    tables.LONG, tables.PIECE, tables.LEAST = 100, 24, 8
    for misaligned in (False, True):
        net = helpers.Net(wide=True, rows=40, long=19 * 24)
        if not misaligned and name in (
            "orthogonal",
            "nesterov-joint",
        ):  # which see columns in another order than memory's
            net.to(memory_format=torch.channels_last)
        agree(name, net, "cpu", 1e-3, steps=2, misaligned=misaligned)
    print(f"{count} steps of {name} agree")


def matrices():
    """Hold the kernels for matrices to float64."""
    torch.manual_seed(0)
    helpers.assert_matrix_kernels_agree("cpu")
    print("matrices agree")


def moments_of_all():
    """Hold the moments kernel to float64."""
    moments.serves = lambda x, slots: True
    moments.slots = lambda like, device=None: moments.SLOTS
    shapes = [*helpers.SHAPES, ((6, 5, 2, 3), 1), ((40, 160), 1), ((2, 40, 96), 2)]
    kinds = itertools.cycle([torch.float32, torch.bfloat16, torch.float16, torch.float32])  # in turn: it takes time
    cases = [*itertools.product(shapes, helpers.LAYOUTS)]
    for k, ((shape, dim), lying) in enumerate(cases):
        x = helpers.inputs_like(shape, next(kinds), lying, "cpu")
        helpers.assert_moments_agree(x, dim, add_by_kernel, 32 if k % 5 == 0 else None)
    forwards_are_told_apart()
    print(f"{len(cases)} moments agree")


def add_by_kernel(stage, look):
    """One call, by the kernel."""
    rows = thinned(look.x, look.dim, stage.limit)
    assert moments.add(rows, look, stage, {})


def forwards_are_told_apart():
    """Calls of one forward count their examples once, others always."""
    stage = LayerStatistics(3, 0, torch.zeros(1))
    stage._clock.fill_(1.5)
    for running in (True, True, False, False):
        stage.forwards.running = running
        add_by_kernel(stage, Look(torch.randn(5, 3), 1, 5, 5))
    assert stage.tally.tolist() == [20, 0, 20, 15]


def on_two_ranks():
    """Compare what two processes make of shared matrices with what one makes."""
    with tempfile.TemporaryDirectory() as folder:
        print(*ranks.run(Path(folder) / "ranks", 2, [(share, ())]))


def share():
    """On each of the ranks: in float32, then in bfloat16."""
    interpret()
    for k, (cls, close) in enumerate(((evenstep.EvenStep, 3e-5), (test_shared_matrices.NarrowEvenStep, 0.02))):
        far, optimizer = test_shared_matrices.largest_distance(test_shared_matrices.replicated, cls, 2)
        assert far[k] <= close, far
        assert all(isinstance(step, triton_step.TritonStep) for step in optimizer._plan.steps if step.rule.matrices)
    return "equal"


def interpret():
    """Let the step kernels run on the CPU."""
    triton_step.HostTable = Direct
    torch.cuda.is_current_stream_capturing = lambda: False
    triton_step.runs_on = lambda weight: weight.dtype in triton_step.KINDS
    with_bools("create_masked_load", 1)
    with_bools("create_masked_store", 2)
    ReduceOps.generic_reduce = by_halves
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    interpret()
    {"steps": steps, "moments": moments_of_all, "matrices": matrices, "ranks": on_two_ranks}[sys.argv[1]](*sys.argv[2:])
