# ruff: noqa: D103
"""The Triton code of `kernels.matrices`."""

import triton
import triton.language as tl

FREE = ("side", "rows", "columns", "weights", "lines", "apart", "others")


@triton.jit
def both_sums(a, b, a2, b2):
    return a + a2, b + b2


@triton.jit(do_not_specialize=FREE)
def trace(gram, found, side, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, side, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(gram + batch * side * side + at * (side + 1), mask=at < side, other=0.0).to(tl.float32)
    tl.store(found + batch, 1 / tl.sqrt(tl.maximum(tl.sum(total, 0), LEAST)))


@triton.jit(do_not_specialize=FREE)
def normalize(gram, short, side, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    size = side * side
    if EVEN:  # side is a multiple of 8: written so that the compiler sees it, and reads eight neighbours at once
        size = size // 8 * 8
    batch, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, scale = at < size, tl.load(short + batch)
    value = tl.load(gram + batch * size + at, mask=here, other=0.0).to(tl.float32)
    tl.store(gram + batch * size + at, value * scale * scale, mask=here)


@triton.jit(do_not_specialize=FREE)
def combine(
    gram, square, short, a, b, c, side, SCALED: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    size = side * side
    if EVEN:
        size = size // 8 * 8
    batch, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    first = tl.load(gram + batch * size + at, mask=here, other=0.0).to(tl.float32)
    second = tl.load(square + batch * size + at, mask=here, other=0.0).to(tl.float32)
    found = b * first + c * second + tl.where(at % (side + 1) == 0, a, 0.0)  # the diagonal
    if SCALED:
        found *= tl.load(short + batch)
    tl.store(square + batch * size + at, found, mask=here)


@triton.jit(do_not_specialize=FREE)
def row_sums(
    factor, scale, sums, moved, rows, columns, weights, SCALED: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if EVEN:
        columns = columns // 8 * 8
    line = factor + (batch * rows + row) * columns
    all_squares = tl.zeros([BLOCK], dtype=tl.float32)
    of_weights = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, columns, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        value = tl.load(line + c, mask=c < columns, other=0.0).to(tl.float32)
        square = value * value
        all_squares += square
        if SCALED:
            s = tl.load(scale + batch * weights + c, mask=c < weights, other=0.0)
            of_weights += square * s * s
        else:
            of_weights += tl.where(c < weights, square, 0.0)
    total, total_of_weights = tl.reduce((all_squares, of_weights), 0, both_sums)
    tl.store(sums + batch * rows + row, total)
    tl.store(moved + batch * rows + row, total_of_weights)


@triton.jit(do_not_specialize=FREE)
def column_sums(
    factor, scale, sums, moved, rows, columns, weights, SCALED: tl.constexpr, EVEN: tl.constexpr,
    TALL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    c, batch = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.program_id(1).to(tl.int64)
    if EVEN:
        columns = columns // 8 * 8
    matrix, inside = factor + batch * rows * columns, c < columns
    squares = tl.zeros([TALL, WIDTH], dtype=tl.float32)
    for begin in range(0, rows, TALL):
        r = begin + tl.arange(0, TALL)
        here = (r < rows)[:, None] & inside[None, :]
        value = tl.load(matrix + r[:, None] * columns + c[None, :], mask=here, other=0.0).to(tl.float32)
        squares += value * value
    total = tl.sum(squares, 0)
    s = 1.0
    if SCALED:
        s = tl.load(scale + batch * weights + c, mask=c < weights, other=0.0)
    tl.store(sums + batch * columns + c, total, mask=inside)
    tl.store(moved + batch * columns + c, tl.where(c < weights, total * s * s, 0.0), mask=inside)


@triton.jit(do_not_specialize=FREE)
def even(
    sums, moved, old, lengths, ok, mean, scale, lines, apart, others,
    MASKED: tl.constexpr, MEMORY: tl.constexpr, LEAST: tl.constexpr, TINY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    sums, moved, own = sums + batch * apart, moved + batch * apart, batch * lines
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, lines, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        before = tl.load(old + own + at, mask=at < lines, other=0.0)
        total += MEMORY * before + (1 - MEMORY) * tl.load(sums + at, mask=at < lines, other=0.0) / others
    least = tl.maximum(LEAST * tl.sum(total, 0) / lines, TINY)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, lines, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        here = at < lines
        before = tl.load(old + own + at, mask=here, other=0.0)
        after = MEMORY * before + (1 - MEMORY) * tl.load(sums + at, mask=here, other=0.0) / others
        squares += tl.load(moved + at, mask=here, other=0.0) / tl.maximum(after, least)
        if MASKED:
            after = tl.where(tl.load(ok) != 0, after, before)
        tl.store(mean + own + at, after, mask=here)
    length = tl.sqrt(tl.sum(squares, 0))
    ratio = tl.where(length > 0, tl.load(lengths + batch) / tl.where(length > 0, length, 1.0), 0.0)
    for begin in range(0, lines, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        here = at < lines
        before = tl.load(old + own + at, mask=here, other=0.0)
        after = MEMORY * before + (1 - MEMORY) * tl.load(sums + at, mask=here, other=0.0) / others
        tl.store(scale + own + at, ratio / tl.sqrt(tl.maximum(after, least)), mask=here)


@triton.jit(do_not_specialize=FREE)
def scale_lines(
    factor, even, out, rows, columns, lines, BY_ROW: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if EVEN:
        columns = columns // 8 * 8
    start, by = (batch * rows + row) * columns, even + batch * lines
    for begin in range(0, columns, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        here = c < columns
        value = tl.load(factor + start + c, mask=here, other=0.0).to(tl.float32)
        if BY_ROW:
            s = tl.load(by + row, mask=row < lines, other=0.0)
        else:
            s = tl.load(by + c, mask=here & (c < lines), other=0.0)
        tl.store(out + start + c, value * s, mask=here)
