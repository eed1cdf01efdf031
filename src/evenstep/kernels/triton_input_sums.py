# ruff: noqa: D103, PLR0124
"""The Triton code of `kernels.input_sums`."""

import triton
import triton.language as tl

FREE = ("rows", "zeros", "applied", "examples", "inputs", "step", "n1", "n2", "n3", "s0", "s1", "s2", "s3")


@triton.jit
def both_sums(a, b, a2, b2):
    return a + a2, b + b2


@triton.jit
def within(begin, stop, inside, TALL: tl.constexpr):
    return (begin + tl.arange(0, TALL) < stop)[:, None] & inside[None, :]


@triton.jit
def rows_from(
    begin, stop, x, column, inside, n1, n2, n3, s0, s1, s2, s3, LINE: tl.constexpr, TALL: tl.constexpr
):  # fmt: skip
    r = begin + tl.arange(0, TALL)
    if LINE:  # rows follow each other at one distance
        offset = r.to(tl.int64) * s3
    else:
        d3, rest = r % n3, r // n3
        d2, rest = rest % n2, rest // n2
        d1, d0 = rest % n1, rest // n1
        offset = d0.to(tl.int64) * s0 + d1.to(tl.int64) * s1 + d2.to(tl.int64) * s2 + d3.to(tl.int64) * s3
    return tl.load(x + offset[:, None] + column[None, :], mask=within(begin, stop, inside, TALL), other=0.0)


@triton.jit(do_not_specialize=FREE)
def add_moments(
    x, slots, centre, tally, seen, clock, rows, zeros, applied, examples, inputs, step, n1, n2, n3, s0, s1, s2, s3,
    DENSE: tl.constexpr, EVEN: tl.constexpr, LINE: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    block, slot, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if EVEN:  # all are multiples of 8: written so that the compiler sees it, and makes one load of eight neighbours
        inputs = inputs // 8 * 8
        s0, s1, s2, s3 = s0 // 8 * 8, s1 // 8 * 8, s2 // 8 * 8, s3 // 8 * 8
    c = block * WIDTH + tl.arange(0, WIDTH)
    inside = c < inputs
    column = c.to(tl.int64)
    if not DENSE:
        column = column * step
    # all is asked for at once, the first rows, the next ones and small things: each would be waited for
    each = (rows + parts - 1) // parts
    start, stop = slot * each, tl.minimum(slot * each + each, rows)
    value = rows_from(start, stop, x, column, inside, n1, n2, n3, s0, s1, s2, s3, LINE, TALL)
    ahead = rows_from(start + TALL, stop, x, column, inside, n1, n2, n3, s0, s1, s2, s3, LINE, TALL)
    middle = tl.load(centre + c, mask=inside, other=0.0)
    first_row = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    mine = slots + slot * 2 * inputs + c
    old_first = tl.load(mine, mask=inside, other=0.0)
    old_second = tl.load(mine + inputs, mask=inside, other=0.0)
    t = tl.arange(0, 4)
    counted = tl.load(tally + t)
    before, now = tl.load(seen), tl.load(clock)
    # every program sees either NaN, and takes the first row, or what another has put there: the first row
    middle = tl.where(middle == middle, middle, first_row)
    first = tl.zeros([TALL, WIDTH], dtype=tl.float32)
    second = tl.zeros([TALL, WIDTH], dtype=tl.float32)
    for begin in range(start, stop, TALL):
        later = rows_from(begin + 2 * TALL, stop, x, column, inside, n1, n2, n3, s0, s1, s2, s3, LINE, TALL)
        away = tl.where(within(begin, stop, inside, TALL), value.to(tl.float32) - middle[None, :], 0.0)
        first += away
        second += away * away
        value, ahead = ahead, later
    found_first, found_second = tl.reduce((first, second), 0, both_sums)
    tl.store(mine, old_first + found_first, mask=inside)
    tl.store(mine + inputs, old_second + found_second, mask=inside)
    if slot == 0:
        tl.store(centre + c, middle, mask=inside)
        if block == 0:
            new = tl.where(before != now, examples, 0)
            count = tl.where(t == 0, rows, tl.where(t == 1, zeros, tl.where(t == 2, applied, new)))
            tl.store(tally + t, counted + count)
            tl.store(seen, now)
