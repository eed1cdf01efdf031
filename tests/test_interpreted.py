"""Triton's kernels where there is no GPU: run by its interpreter, and built for one (make test-kernels)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cases import BY_HAND, TORCH_RULES

pytestmark = pytest.mark.kernels
INTERPRETER = str(Path(__file__).with_name("triton_interpreter.py"))


def said_by(*words, interpreted=True):
    """The last line of Python with Triton in a process of its own, which decides at its start whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if interpreted else None
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return done.stdout.strip() if done.returncode == 0 else done.stderr[-3000:]


@pytest.mark.parametrize("name", [name for name in BY_HAND | TORCH_RULES if name != "muon"])
def test_steps_by_the_interpreter(name):
    count = 14 if name == "orthogonal" else 7  # beside that, AdamW has steps
    assert said_by(INTERPRETER, "steps", name) == f"{count} steps of {name} agree"


def test_matrices_by_the_interpreter():
    assert said_by(INTERPRETER, "matrices") == "matrices agree"


def test_moments_by_the_interpreter():
    assert said_by(INTERPRETER, "moments") == "36 moments agree"


def test_two_ranks_share_matrices_by_the_interpreter():
    assert said_by(INTERPRETER, "ranks") == "['equal'] ['equal']"


BUILD = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evenstep.kernels.input_sums import TALL
from evenstep.step.triton import table_spec as spec
from evenstep.step.triton.triton_step import LAUNCH, kernels
from evenstep.kernels import triton_input_sums

tables = dict.fromkeys(("addresses", "shapes"), "*i64")
floats = ("settings", "vectors", "layers", "sums", "motion", "batch", "last", "fired")
floats += ("slots", "centre", "tally", "seen", "clock")
types = {**tables, **dict.fromkeys(floats, "*fp32"), "owner": "*i32", "ok": "*i1", "x": "*bf16"}
types |= {"floor": "fp32", "one": "fp32"}
sizes = []


def build(kernel, warps, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["cubin"]
    sizes.append(len(code))


def built(name, **constants):
    warps, block = LAUNCH[name]
    build(kernels()[name].kernel, warps, **constants, BLOCK=block, VERSION=spec.VERSION)


for flag in (True, False):
    built("frame", LINEAR=flag, PLAIN_SIZE=not flag, SLOTS=16)
    built("commit")
    for other in (True, False):
        for external in sorted({False, not flag}):
            built("measure", UNIT_SCALE=flag, OWN_RATE=external, LINEAR=not flag, GUARD=other, PROJECT=other)
            kinds = {"KIND": "bfloat16" if flag != external else "float32", "RULE_KIND": "bfloat16"}
            if external:
                built("write_gradients", MEMORY=0.9 if other else -1.0, PROJECT=other, **kinds)
            for name in ("add_up", "move"):
                rule = {"MOMENTUM": 0.9 * flag, "NESTEROV": flag and other, "PROJECT": other}
                built(name, **rule, EXTERNAL=external, **kinds)
    for width, tall in TALL.items():
        build(triton_input_sums.add_moments, 4, DENSE=flag, EVEN=flag, LINE=flag, WIDTH=width, TALL=tall)
print(len(sizes), "built,", min(sizes) > 1000)
"""


def test_kernels_build_for_a_gpu():
    """Triton compiles for a GPU that is not there, down to machine code."""
    assert said_by("-c", BUILD, interpreted=False) == "28 built, True"
