"""The step kernels on the CPU, by Triton's interpreter, against the block-by-block loop; where Triton is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# the interpreter of Triton 3.9 wants bools for a mask, and makes numbers of a bool that it combines with another
MASKS = """
from triton.runtime.interpreter import InterpreterBuilder

def with_bools(name, place):
    plain = getattr(InterpreterBuilder, name)

    def masked(self, *arguments):
        mask = arguments[place]
        mask.data = mask.data.astype(bool)
        return plain(self, *arguments)

    setattr(InterpreterBuilder, name, masked)

with_bools("create_masked_load", 1)
with_bools("create_masked_store", 2)
"""

CODE = """
import sys, warnings
import torch
sys.path.insert(0, {tests!r})
import test_kernels as t
from evenstep import layout, shell
from evenstep.kernels import native, step, tables

native.library = lambda dtype: None

class Direct:
    # a table that needs no sending
    def __init__(self, rows, columns, dtype, device):
        self.dtype, self.last, self.there = dtype, None, None

    def send(self, now):
        self.there = torch.tensor(now, dtype=self.dtype)
        return self.there


step.Sent = Direct
torch.cuda.is_current_stream_capturing = lambda: False
torch.set_num_threads(1)
shell.begin = lambda layout, state, **k: step.TritonStep(layout, state, **k)
yes = torch.ones((), dtype=torch.bool)
make, commit = step.TritonStep.move, step.TritonStep.commit
step.TritonStep.move = lambda self, ok, floor: make(self, yes, floor)
step.TritonStep.commit = lambda self, ok: commit(self, yes)
warnings.simplefilter("ignore")
by = "torch"  # for all that layouts know
layout.shows = lambda block, joint: not joint or layout.inner(block) == block.matrix(block.weight).shape[3]
for name in {names!r}:
    for poison in ((), (1,)):
        torch.manual_seed(3)
        t.assert_steps_agree(name, t.Net(), "cpu", 1e-3, steps=3, poison=poison, by=by)
    step.SHAPE["measure"] = 1, 16  # so that several programs share the embedding
    tables.LONG, tables.PIECE, tables.LEAST = 100, 24, 8
    t.assert_steps_agree(name, t.Net(wide=True, rows=40, long=19 * 24), "cpu", 1e-3, steps=2, by=by)
    print(name, "agrees", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("sg", "momentum", "unguarded", "fan-in", "even", "even-plain", "even-tight", "even-tensor-lr"),
        *("adamw", "adamw-tight", "nesterov-joint"),
    ],
)
def test_kernels_by_the_interpreter(name):
    pytest.importorskip("triton")
    code = MASKS + CODE.format(tests=str(Path(__file__).parent), names=[name])
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


MOMENTS = """
import torch
from evenstep.kernels import moments
from evenstep.layers import Look
from evenstep.stages import Stage, glance

moments.serves = lambda x, slots: True
CASES = [((7, 5), 1, None), ((300, 72), 1, 100), ((4, 16, 9, 9), 1, 128), ((3, 6, 5, 5), 1, None)]
CASES += [((2, 40, 96), 2, 32), ((40, 160), 1, None), ((6, 5, 2, 3), 1, 7)]
for shape, dim, limit in CASES:
    for kind in (torch.float32, torch.bfloat16):
        x = (torch.randn(shape) + 3).to(kind)
        if limit == 128:
            x = x.to(memory_format=torch.channels_last)
        stage = Stage(shape[dim], 0, torch.zeros(1), limit=limit)
        stage._slots = torch.zeros(moments.SLOTS, 2, shape[dim])
        known = glance(x, Look(None, dim, shape[0], x.numel() // shape[dim]), limit)
        rows = known.rows.of(x)
        for _ in range(2):
            assert moments.add(rows, known.look, stage, known.calls)
        away = rows.double().movedim(dim, -1).reshape(-1, shape[dim]) - stage.centre
        first, second = stage._slots.double().sum(0)
        torch.testing.assert_close(first, 2 * away.sum(0), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(second, 2 * away.square().sum(0), rtol=1e-4, atol=1e-3)
        assert stage._tally.tolist() == [2 * len(away), 0, 2 * known.look.applied, 2 * shape[0]]
        stage._clock.fill_(1.5)
        for running in (True, True, False, False):  # calls of a forward count their examples once, others always
            stage.forwards.running = running
            moments.add(rows, known.look, stage, known.calls)
        assert stage._tally[3] == 5 * shape[0]
"""


@pytest.mark.slow
def test_the_moments_kernel_by_the_interpreter():
    pytest.importorskip("triton")
    command, environment = [sys.executable, "-c", MASKS + MOMENTS], {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


BUILD = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evenstep.kernels.moments import TALL
from evenstep.kernels.step import SHAPE, _kernels
from evenstep.kernels import triton_moments

tables = dict.fromkeys(("addresses", "shapes"), "*i64")
floats = ("settings", "vectors", "layers", "sums", "motion", "fresh", "last", "fired")
floats += ("slots", "centre", "tally", "seen", "clock")
types = {**tables, **dict.fromkeys(floats, "*fp32"), "owner": "*i32", "ok": "*i1", "x": "*bf16"}
types |= {"floor": "fp32", "one": "fp32"}


def build(kernel, warps, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def built(name, **constants):
    warps, block = SHAPE[name]
    build(_kernels()[name].kernel, warps, **constants, BLOCK=block)


for flag in (True, False):
    built("frame", LINEAR=flag, SLOTS=16)
    built("commit")
    for other in (True, False):
        crowd = 3.0 if flag else 0.0
        for given in (False, not flag):
            built("measure", EVEN=flag, GIVEN=given, GUARD=other, CROWD=crowd, PROJECT=other, TURNS=1 + other)
            for name in ("add_up", "move", *(["show"] if given else [])):
                sizes = {"MOMENTUM": 0.9, "HAS_MOMENTUM": flag, "AHEAD": flag and other, "PROJECT": other}
                built(name, **sizes, GIVEN=given, KIND="bfloat16" if flag != given else "float32")
    for width, tall in TALL.items():
        build(triton_moments.add_moments, 4, DENSE=flag, EVEN=flag, LINE=flag, WIDTH=width, TALL=tall)
"""


@pytest.mark.slow
def test_kernels_build_for_a_gpu():
    """Triton compiles for a GPU that is not there, down to machine code."""
    pytest.importorskip("triton")
    command = [sys.executable, "-c", BUILD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
