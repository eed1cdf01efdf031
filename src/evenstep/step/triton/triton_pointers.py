# ruff: noqa: D103
"""Addresses from tables as pointers, for the Triton code of `kernels.step`."""

import triton
import triton.language as tl

from . import tables

ADDRESSES = tl.constexpr(tables.ADDRESSES)  # columns of the tables
SHAPES = tl.constexpr(tables.SHAPES)
SETTINGS = tl.constexpr(tables.SETTINGS)
SIZES = ("width", "units", "blocks")  # that kernels are not built anew for


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
