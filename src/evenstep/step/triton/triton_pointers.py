# ruff: noqa: D103
"""Addresses from tables as pointers."""

import triton
import triton.language as tl

SIZES = ("width", "units", "blocks")  # arguments whose value does not make Triton build a kernel anew


@triton.jit
def pointer(address, KIND: tl.constexpr):
    if KIND == "float32":
        return address.to(tl.pointer_type(tl.float32))
    elif KIND == "bfloat16":
        return address.to(tl.pointer_type(tl.bfloat16))
    else:
        return address.to(tl.pointer_type(tl.float16))


@triton.jit
def floats(address):
    return address.to(tl.pointer_type(tl.float32))
