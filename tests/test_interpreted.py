"""The step kernels on the CPU, by Triton's interpreter, against the block-by-block loop; where Triton is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import copy, sys
import torch
sys.path.insert(0, {tests!r})
import test_kernels as t
from evenstep import shell, together
from evenstep.kernels import step


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
for name in {names!r}:
    for poison in ((), (1,)):
        torch.manual_seed(3)
        single = t.Net()
        many = copy.deepcopy(single)
        loop, kernels = t.OPTIMIZERS[name](single, foreach=False), t.OPTIMIZERS[name](many)
        shell_move = step.TritonStep.move
        step.TritonStep.move = lambda self, ok, floor: shell_move(self, torch.ones((), dtype=torch.bool), floor)
        shell_commit = step.TritonStep.commit
        step.TritonStep.commit = lambda self, ok: shell_commit(self, torch.ones((), dtype=torch.bool))
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            t.train(loop, single, "cpu", steps=3, poison=poison)
            t.train(kernels, many, "cpu", steps=3, poison=poison)
        step.TritonStep.move, step.TritonStep.commit = shell_move, shell_commit
        assert kernels._plan.layouts and len(kernels._plan.rest) == 0, kernels._plan.rest
        for (label, a), b in zip(single.named_parameters(), many.parameters()):
            torch.testing.assert_close(b, a, rtol=5e-3, atol=3e-4, msg=lambda m: f"{{name}} {{label}}: {{m}}")
        expected, found = t.states(loop, single), t.states(kernels, many)
        for key, value in expected.items():
            message = lambda m: f"{{name}} {{key}}: {{m}}"
            torch.testing.assert_close(found[key], value, rtol=5e-3, atol=3e-4, msg=message)
        assert loop.fired() == kernels.fired(), (loop.fired(), kernels.fired())
    print(name, "agrees", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sg", "momentum", "unguarded", "fan-in", "even", "even-plain", "even-tight"])
def test_kernels_by_the_interpreter(name):
    pytest.importorskip("triton")
    code = CODE.format(tests=str(Path(__file__).parent), names=[name])
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


BUILD = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evenstep.kernels import triton_moments, triton_step as t

tables = dict.fromkeys(("addresses", "shapes"), "*i64")
floats = ("settings", "vectors", "layers", "sums", "motion", "fresh", "last", "fired")
floats += ("slots", "centre", "tally", "seen", "clock")
types = {**tables, **dict.fromkeys(floats, "*fp32"), "owner": "*i32", "ok": "*i1", "x": "*bf16"}
types |= {"floor": "fp32", "one": "fp32"}


def build(kernel, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


for flag in (True, False):
    build(t.frame, LINEAR=flag, BLOCK=256)
    build(t.commit, BLOCK=256)
    for other in (True, False):
        crowd = 3.0 if flag else 0.0
        build(t.measure, EVEN=flag, GUARD=other, CROWD=crowd, PROJECT=other, TURNS=1 + other, BLOCK=512)
        for kernel in (t.add_up, t.move):
            sizes = {"MOMENTUM": 0.9, "HAS_MOMENTUM": flag, "AHEAD": flag and other, "PROJECT": other}
            build(kernel, **sizes, KIND="bfloat16" if flag else "float32", BLOCK=1024)
    for width in (16, 32, 64):
        build(triton_moments.add_moments, DENSE=flag, WIDTH=width, TALL=2048 // width, SLOTS=16)
"""


@pytest.mark.slow
def test_kernels_build_for_a_gpu():
    """Triton compiles for a GPU that is not there, down to machine code."""
    pytest.importorskip("triton")
    command = [sys.executable, "-c", BUILD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
