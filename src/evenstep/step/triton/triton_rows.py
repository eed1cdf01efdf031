# ruff: noqa: D103, SIM102 -- Triton's language has no docstrings, NaN tests or "and" of its own
"""The Triton code of `kernels.step` with one program for each unit, along its row of weights: sums, then motion.

Where a rule of torch's gives the steps (`GIVEN`), it is shown the gradients first, and both take its steps for them.
Rows are read and written four numbers at a time where all of them lie evenly (`EVEN`), which the compiler must see.
Others take half as many at a time: were the numbers the same, threads would have four neighbours each there, too, and
read them one by one.
"""

import triton
import triton.language as tl

from .triton_pointers import ADDRESSES, SETTINGS, SHAPES, SIZES, floats, pointer


@triton.jit
def all_sums(a, b, c, d, e, f, a2, b2, c2, d2, e2, f2):
    return a + a2, b + b2, c + c2, d + d2, e + e2, f + f2


@triton.jit
def row_of(unit, p, s, beta, width, GIVEN: tl.constexpr, KIND: tl.constexpr):
    flags, row = tl.load(s + 6), unit - tl.load(s + 5)
    columns, inputs, inner = tl.load(s).to(tl.int32), tl.load(s + 1).to(tl.int32), tl.load(s + 2).to(tl.int32)
    moving = (flags & 2) != 0
    base = tl.load(s + 4) + tl.where(moving, row // tl.load(s + 3) * inputs, 0)
    inputs = tl.where(moving, inputs, columns)
    weight, grad, buffer = tl.load(p), tl.load(p + 1), tl.load(p + 2)
    apart = columns
    if GIVEN:
        grad, apart = tl.load(p + 17), tl.load(s + 12).to(tl.int32)
    even = (((weight | grad | buffer) % 16) == 0) & (inner == 1) & (columns % 8 == 0) & (inputs % 8 == 0)
    if GIVEN:
        even = even & (apart % 8 == 0)
    scale = tl.where((flags & 8) != 0, -1.0, 1.0) * tl.load(beta)
    weight, grad, buffer = pointer(weight, KIND), pointer(grad, KIND), pointer(buffer, KIND)
    lies = row, columns, apart, inputs, inner, base, width, weight, grad, buffer
    return flags, moving, row, scale, even, lies


@triton.jit
def lying(lies, EVEN: tl.constexpr):
    row, columns, apart, inputs, inner, base, width, weight, grad, buffer = lies
    weight, grad, buffer = weight + row * columns, grad + row * apart, buffer + row * columns
    if EVEN:  # multiples of 8, and of 16 bytes
        columns, inputs, base, width = columns // 8 * 8, inputs // 8 * 8, base // 8 * 8, width // 8 * 8
        weight, grad, buffer = tl.multiple_of(weight, 16), tl.multiple_of(grad, 16), tl.multiple_of(buffer, 16)
    return columns, inputs, inner, base, width, weight, grad, buffer


@triton.jit
def input_at(column, columns, inputs, inner, EVEN: tl.constexpr):
    found = column
    if inputs != columns:  # a kernel's positions share an input
        if EVEN:
            found = column % inputs
        else:
            found = (column // inner) % inputs
    return found


@triton.jit
def on_v_at(grad, c, here, scale, alpha, shift, u, GIVEN: tl.constexpr):
    found = tl.load(grad + c, mask=here, other=0.0).to(tl.float32)
    if not GIVEN:
        found = scale * alpha * found - shift * u
    return found


@triton.jit
def projected(lies, vectors, scale, BLOCK: tl.constexpr):
    columns, inputs, inner, base, width, _, grad, _ = lying(lies, False)
    along = tl.zeros([BLOCK], dtype=tl.float32)
    lengths = tl.zeros([BLOCK], dtype=tl.float32)
    bents = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, columns, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        here = c < columns
        i = base + input_at(c, columns, inputs, inner, False)
        alpha = tl.load(vectors + width + i, mask=here, other=0.0)
        u = alpha * tl.load(vectors + i, mask=here, other=0.0)
        fresh = tl.load(vectors + 3 * width + i, mask=here, other=0.0)
        along += scale * alpha * u * tl.load(grad + c, mask=here, other=0.0).to(tl.float32)
        lengths += u * u
        bents += alpha * alpha * fresh * u * u
    norm2 = tl.sum(lengths, 0)
    root = tl.sqrt(1 + norm2)
    kappa = 1 / (root * (1 + root))
    return kappa, norm2, tl.sum(bents, 0), kappa * tl.sum(along, 0)


@triton.jit
def show_row(lies, moving, scale, shift, vectors, to, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    columns, inputs, inner, base, width, _, grad, _ = lying(lies, EVEN)
    if EVEN:
        to = tl.multiple_of(to, 16)
    bad = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, columns, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        here = c < columns
        i, known = base + input_at(c, columns, inputs, inner, EVEN), here & moving
        alpha = tl.load(vectors + width + i, mask=known, other=1.0)
        u = alpha * tl.load(vectors + i, mask=known, other=0.0)
        value = tl.load(grad + c, mask=here, other=0.0).to(tl.float32)
        bad += tl.where(value - value == 0, 0.0, 1.0)
        tl.store(to + c, scale * alpha * value - shift * u, mask=here)
    return tl.sum(bad, 0)


@triton.jit(do_not_specialize=SIZES)
def show(
    addresses, shapes, settings, owner, vectors, layers, sums, motion, ok, width, units,
    MOMENTUM: tl.constexpr, HAS_MOMENTUM: tl.constexpr, AHEAD: tl.constexpr, PROJECT: tl.constexpr,
    GIVEN: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK // 2
    unit = tl.program_id(0)
    block = tl.load(owner + unit).to(tl.int64)
    p, s = addresses + block * ADDRESSES, shapes + block * SHAPES
    flags, moving, row, scale, even, lies = row_of(unit, p, s, layers + block, width, False, KIND)
    apart = tl.load(s + 12)
    even = even & ((tl.load(p + 15) % 16) == 0) & (apart % 8 == 0)
    shift = 0.0
    bad = 0.0
    if (flags & 1) != 0:
        shift = scale * tl.load(pointer(tl.load(p + 4), KIND) + row).to(tl.float32)
        bad = tl.where(shift - shift == 0, 0.0, 1.0)
        tl.store(pointer(tl.load(p + 16), KIND) + row * tl.load(s + 13), shift)
    if PROJECT:
        if (flags & 3) == 2:
            _, _, _, shift = projected(lies, vectors, scale, HALF)
    to = pointer(tl.load(p + 15), KIND) + row * apart
    if even:
        bad += show_row(lies, moving, scale, shift, vectors, to, True, BLOCK)
    else:
        bad += show_row(lies, moving, scale, shift, vectors, to, False, HALF)
    tl.store(sums + unit, tl.where(bad > 0, float("inf"), 0.0))


@triton.jit
def row_sums(
    lies, moving, scale, shift, vectors,
    MOMENTUM: tl.constexpr, HAS_MOMENTUM: tl.constexpr, AHEAD: tl.constexpr, PROJECT: tl.constexpr,
    GIVEN: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns, inputs, inner, base, width, weight, grad, buffer = lying(lies, EVEN)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    along = tl.zeros([BLOCK], dtype=tl.float32)
    stretch = tl.zeros([BLOCK], dtype=tl.float32)
    bend = tl.zeros([BLOCK], dtype=tl.float32)
    means = tl.zeros([BLOCK], dtype=tl.float32)
    lengths = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, columns, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        here = c < columns
        i, known = base + input_at(c, columns, inputs, inner, EVEN), here & moving
        mu = tl.load(vectors + i, mask=known, other=0.0)
        alpha = tl.load(vectors + width + i, mask=known, other=1.0)
        spread = tl.load(vectors + 2 * width + i, mask=known, other=1.0)
        fresh = tl.load(vectors + 3 * width + i, mask=known, other=1.0)
        u = alpha * mu
        on_v = on_v_at(grad, c, here, scale, alpha, shift, u, GIVEN)
        d = on_v
        if HAS_MOMENTUM:
            held = MOMENTUM * tl.load(buffer + c, mask=here, other=0.0).to(tl.float32) + on_v
            d = held
            if AHEAD:
                d = on_v + MOMENTUM * held
        squares += on_v * on_v
        step = alpha * d
        along += mu * step
        stretch += fresh * step * step
        if PROJECT:
            bend += fresh * alpha * u * step
        w = tl.load(weight + c, mask=here, other=0.0).to(tl.float32)
        means += mu * w
        lengths += w * w * spread
    return tl.reduce((squares, along, stretch, means, lengths, bend), 0, all_sums)  # warps wait for each other once


@triton.jit(do_not_specialize=SIZES)
def add_up(
    addresses, shapes, settings, owner, vectors, layers, sums, motion, ok, width, units,
    MOMENTUM: tl.constexpr, HAS_MOMENTUM: tl.constexpr, AHEAD: tl.constexpr, PROJECT: tl.constexpr,
    GIVEN: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK // 2
    unit = tl.program_id(0)
    block = tl.load(owner + unit).to(tl.int64)
    p, s = addresses + block * ADDRESSES, shapes + block * SHAPES
    flags, moving, row, scale, even, lies = row_of(unit, p, s, layers + block, width, GIVEN, KIND)
    shift = 0.0
    direction = 0.0
    level = 0.0
    if tl.load(p + 3) != 0:
        level = tl.load(pointer(tl.load(p + 3), KIND) + row).to(tl.float32)
    if GIVEN:
        if (flags & 1) != 0:
            direction = tl.load(pointer(tl.load(p + 18), KIND) + row * tl.load(s + 13)).to(tl.float32)
    elif (flags & 1) != 0:
        shift = scale * tl.load(pointer(tl.load(p + 4), KIND) + row).to(tl.float32)
        direction = shift
        if HAS_MOMENTUM:
            held = MOMENTUM * tl.load(pointer(tl.load(p + 5), KIND) + row).to(tl.float32) + shift
            direction = held
            if AHEAD:
                direction = shift + MOMENTUM * held
    square = shift * shift
    if PROJECT:
        kappa = 0.0
        norm2 = 0.0
        bent2 = 0.0
        if (flags & 3) == 2:
            kappa, norm2, bent2, back = projected(lies, vectors, scale, HALF)
            if not GIVEN:
                shift = back
        tl.store(sums + 8 * units + unit, kappa)
        tl.store(sums + 9 * units + unit, norm2)
        tl.store(sums + 3 * units + unit, bent2)
    if even:
        squares, along, stretch, means, lengths, bend = row_sums(
            lies, moving, scale, shift, vectors,
            MOMENTUM, HAS_MOMENTUM, AHEAD, PROJECT, GIVEN, True, BLOCK,
        )  # fmt: skip
    else:
        squares, along, stretch, means, lengths, bend = row_sums(
            lies, moving, scale, shift, vectors,
            MOMENTUM, HAS_MOMENTUM, AHEAD, PROJECT, GIVEN, False, HALF,
        )  # fmt: skip
    tl.store(sums + unit, square + squares)
    tl.store(sums + units + unit, along)
    tl.store(sums + 2 * units + unit, stretch)
    tl.store(sums + 4 * units + unit, level + means)
    tl.store(sums + 5 * units + unit, lengths)
    tl.store(sums + 6 * units + unit, direction)
    tl.store(sums + 7 * units + unit, shift)
    if PROJECT:
        tl.store(motion + unit, bend)  # until `measure` reads it


@triton.jit
def move_row(
    lies, moving, scale, shift, vectors, left, gain, back,
    MOMENTUM: tl.constexpr, HAS_MOMENTUM: tl.constexpr, AHEAD: tl.constexpr, GIVEN: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns, inputs, inner, base, width, weight, grad, buffer = lying(lies, EVEN)
    for begin in range(0, columns, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        here = c < columns
        i, known = base + input_at(c, columns, inputs, inner, EVEN), here & moving
        alpha = tl.load(vectors + width + i, mask=known, other=1.0)
        u = alpha * tl.load(vectors + i, mask=known, other=0.0)
        on_v = on_v_at(grad, c, here, scale, alpha, shift, u, GIVEN)
        w = tl.load(weight + c, mask=here, other=0.0).to(tl.float32)
        d = on_v
        if HAS_MOMENTUM:
            held = MOMENTUM * tl.load(buffer + c, mask=here, other=0.0).to(tl.float32) + on_v
            tl.store(buffer + c, held, mask=here)
            d = held
            if AHEAD:
                d = on_v + MOMENTUM * held
        tl.store(weight + c, left * w + gain * alpha * (d - back * u), mask=here)


@triton.jit(do_not_specialize=SIZES)
def move(
    addresses, shapes, settings, owner, vectors, layers, sums, motion, ok, width, units,
    MOMENTUM: tl.constexpr, HAS_MOMENTUM: tl.constexpr, AHEAD: tl.constexpr, PROJECT: tl.constexpr,
    GIVEN: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(ok) == 0:
        return
    unit = tl.program_id(0)
    block = tl.load(owner + unit).to(tl.int64)
    p, s, g = addresses + block * ADDRESSES, shapes + block * SHAPES, settings + block * SETTINGS
    flags, moving, row, scale, even, lies = row_of(unit, p, s, layers + block, width, GIVEN, KIND)
    shift = tl.load(sums + 7 * units + unit)
    gain, back = tl.load(motion + unit), tl.load(motion + units + unit)
    ratio = tl.load(g + 2)
    left = 1 - tl.load(g) * ratio * tl.load(g + 3)
    if AHEAD:
        if row == 0:  # EvenStep's squares have been averaged
            mass, decay = floats(tl.load(p + 14)), tl.load(g + 8)
            tl.store(mass, decay * tl.load(mass) + (1 - decay))
    if (flags & 1) != 0:
        at = pointer(tl.load(p + 3), KIND) + row
        left_bias = 1 - tl.load(g + 1) * ratio * tl.load(g + 4)
        tl.store(at, tl.load(at).to(tl.float32) * left_bias + tl.load(motion + 2 * units + unit))
        if HAS_MOMENTUM:
            at = pointer(tl.load(p + 5), KIND) + row
            tl.store(at, MOMENTUM * tl.load(at).to(tl.float32) + shift)
    if even:
        move_row(
            lies, moving, scale, shift, vectors, left, gain, back,
            MOMENTUM, HAS_MOMENTUM, AHEAD, GIVEN, True, BLOCK,
        )  # fmt: skip
    else:
        move_row(
            lies, moving, scale, shift, vectors, left, gain, back,
            MOMENTUM, HAS_MOMENTUM, AHEAD, GIVEN, False, BLOCK // 2,
        )  # fmt: skip
