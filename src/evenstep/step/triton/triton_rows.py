# ruff: noqa: D103, SIM102 -- Triton's language has no docstrings, NaN tests or "and" of its own
"""The Triton code of a step with one program for each unit, along its row of weights: sums, then the step.

Where a rule makes the steps in torch operations (`EXTERNAL`), `write_gradients` writes what it needs, and the other two
read its steps. With `MEMORY`, the weight of the old value in a momentum, that is Nesterov's direction of the mean.
Addresses from a table have no known alignment, so a program looks, and takes one of two loops: rows are read and
written four numbers at a time where all of them are aligned (`EVEN`), which the compiler must see. Others take half as
many at a time: were the numbers the same, threads would have four neighbours each there, too, and read them one by one.
"""

import triton
import triton.language as tl

from . import table_spec as spec
from .triton_pointers import SIZES, floats, pointer


@triton.jit
def all_sums(a, b, c, d, e, f, a2, b2, c2, d2, e2, f2):
    return a + a2, b + b2, c + c2, d + d2, e + e2, f + f2


@triton.jit
def tables_of(unit, addresses, shapes, settings, owner, layers):
    block = tl.load(owner + unit).to(tl.int64)
    p, s, g = addresses + block * spec.ADDRESSES, shapes + block * spec.SHAPES, settings + block * spec.SETTINGS
    return p, s, g, layers + block * spec.LAYERS


@triton.jit
def row_of(unit, p, s, layer, width, EXTERNAL: tl.constexpr, KIND: tl.constexpr, RULE_KIND: tl.constexpr):
    flags, row = tl.load(s + spec.FLAGS), unit - tl.load(s + spec.START)
    columns, inner = tl.load(s + spec.COLUMNS).to(tl.int32), tl.load(s + spec.INNER).to(tl.int32)
    inputs = tl.load(s + spec.INPUTS).to(tl.int32)
    moving = (flags & spec.WHITENED) != 0
    base = tl.load(s + spec.BASE) + tl.where(moving, row // tl.load(s + spec.PER_GROUP) * inputs, 0)
    inputs = tl.where(moving, inputs, columns)
    weight, grad, buffer = tl.load(p + spec.WEIGHT), tl.load(p + spec.GRAD), tl.load(p + spec.BUFFER)
    apart, turned = columns, (flags & spec.TURNED) != 0
    if EXTERNAL:
        grad, apart = tl.load(p + spec.FROM_RULE), tl.load(s + spec.RULE_ROW).to(tl.int32)
    even = (((weight | grad | buffer) % 16) == 0) & (inner == 1) & (columns % 8 == 0) & (inputs % 8 == 0)
    if EXTERNAL:
        even = even & (apart % 8 == 0) & (turned == 0)
    scale = tl.where((flags & spec.MAXIMIZE) != 0, -1.0, 1.0) * tl.load(layer + spec.BETA)
    weight, buffer = pointer(weight, KIND), pointer(buffer, KIND)
    if EXTERNAL:
        grad = pointer(grad, RULE_KIND)
    else:
        grad = pointer(grad, KIND)
    lies = row, columns, apart, inputs, inner, base, width, weight, grad, buffer, turned
    return flags, moving, row, scale, even, lies


@triton.jit
def lying(lies, EVEN: tl.constexpr):
    row, columns, apart, inputs, inner, base, width, weight, grad, buffer, _ = lies
    weight, grad, buffer = weight + row * columns, grad + row * apart, buffer + row * columns
    if EVEN:  # multiples of 8, and of 16 bytes
        columns, inputs, base, width = columns // 8 * 8, inputs // 8 * 8, base // 8 * 8, width // 8 * 8
        weight, grad, buffer = tl.multiple_of(weight, 16), tl.multiple_of(grad, 16), tl.multiple_of(buffer, 16)
    return columns, inputs, inner, base, width, weight, grad, buffer


@triton.jit
def without_columns(lies, when):
    row, columns, apart, inputs, inner, base, width, weight, grad, buffer, turned = lies
    return row, tl.where(when, 0, columns), apart, inputs, inner, base, width, weight, grad, buffer, turned


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
def for_rule(c, lies, EVEN: tl.constexpr):
    _, columns, _, inputs, _, _, _, _, _, _, turned = lies
    found = c
    if not EVEN:
        if turned:
            found = c % inputs * (columns // inputs) + c // inputs
    return found


@triton.jit
def on_v_at(grad, c, lies, here, scale, alpha, shift, u, EXTERNAL: tl.constexpr, EVEN: tl.constexpr):
    at = c
    if EXTERNAL:
        at = for_rule(c, lies, EVEN)
    found = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
    if not EXTERNAL:
        found = scale * alpha * found - shift * u
    return found


@triton.jit
def pushed(on_v, old, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr):
    held = MOMENTUM * old.to(tl.float32) + on_v
    direction = held
    if NESTEROV:
        direction = on_v + MOMENTUM * held
    return held, direction


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
        alpha = tl.load(vectors + spec.ALPHA * width + i, mask=here, other=0.0)
        u = alpha * tl.load(vectors + spec.MU * width + i, mask=here, other=0.0)
        fresh = tl.load(vectors + spec.FRESH * width + i, mask=here, other=0.0)
        along += scale * alpha * u * tl.load(grad + c, mask=here, other=0.0).to(tl.float32)
        lengths += u * u
        bents += alpha * alpha * fresh * u * u
    norm2 = tl.sum(lengths, 0)
    root = tl.sqrt(1 + norm2)
    kappa = 1 / (root * (1 + root))
    return kappa, norm2, tl.sum(bents, 0), kappa * tl.sum(along, 0)


@triton.jit
def ahead(on_v, at, here, good, MEMORY: tl.constexpr):
    old = tl.load(at, mask=here, other=0.0)
    mean = old + (1 - MEMORY) * (on_v - old)
    tl.store(at, mean, mask=here & good)
    return on_v + MEMORY * (mean - on_v)


@triton.jit
def write_row(
    lies, moving, scale, shift, vectors, to, memory, good,
    MEMORY: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns, inputs, inner, base, width, _, grad, _ = lying(lies, EVEN)
    if EVEN:
        to, memory = tl.multiple_of(to, 16), tl.multiple_of(memory, 16)
    for begin in range(0, columns, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        here = c < columns
        i, known = base + input_at(c, columns, inputs, inner, EVEN), here & moving
        alpha = tl.load(vectors + spec.ALPHA * width + i, mask=known, other=1.0)
        u = alpha * tl.load(vectors + spec.MU * width + i, mask=known, other=0.0)
        value = tl.load(grad + c, mask=here, other=0.0).to(tl.float32)
        on_v, at = tl.where(good, scale * alpha * value - shift * u, 0.0), for_rule(c, lies, EVEN)
        if MEMORY >= 0:
            on_v = ahead(on_v, memory + at, here, good, MEMORY)
        tl.store(to + at, on_v, mask=here)


@triton.jit(do_not_specialize=SIZES)
def write_gradients(
    addresses, shapes, settings, owner, vectors, layers, sums, motion, ok, width, units,
    MEMORY: tl.constexpr, PROJECT: tl.constexpr,
    KIND: tl.constexpr, RULE_KIND: tl.constexpr, BLOCK: tl.constexpr, VERSION: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK // 2
    unit, good = tl.program_id(0), tl.load(ok) != 0
    p, s, _settings, layer = tables_of(unit, addresses, shapes, settings, owner, layers)
    flags, moving, row, scale, even, lies = row_of(unit, p, s, layer, width, False, KIND, RULE_KIND)
    apart, columns = tl.load(s + spec.RULE_ROW), tl.load(s + spec.COLUMNS)
    even = even & ((tl.load(p + spec.TO_RULE) % 16) == 0) & (apart % 8 == 0) & ((flags & spec.TURNED) == 0)
    memory = floats(tl.load(p + spec.MEMORY_OF_RULE))
    if MEMORY >= 0:  # with the bias as a column
        held = columns + tl.where((flags & spec.BIASED) != 0, 1, 0)
        even = even & ((tl.load(p + spec.MEMORY_OF_RULE) % 16) == 0) & (held % 4 == 0)
        memory += row * held
    shift = 0.0
    if (flags & spec.BIASED) != 0:
        shift = scale * tl.load(pointer(tl.load(p + spec.BIAS_GRAD), KIND) + row).to(tl.float32)
        to = pointer(tl.load(p + spec.BIAS_TO_RULE), RULE_KIND) + row * tl.load(s + spec.BIAS_RULE_ROW)
        on_v = tl.where(good, shift * tl.load(layer + spec.CONSTANT), 0.0)
        if MEMORY >= 0:
            on_v = ahead(on_v, memory + columns, good, good, MEMORY)
        tl.store(to, on_v)
    if PROJECT:
        if (flags & (spec.BIASED | spec.WHITENED)) == spec.WHITENED:
            _, _, _, shift = projected(lies, vectors, scale, HALF)
    to = pointer(tl.load(p + spec.TO_RULE), RULE_KIND) + row * apart
    if even:
        write_row(lies, moving, scale, shift, vectors, to, memory, good, MEMORY, True, BLOCK)
    else:
        write_row(lies, moving, scale, shift, vectors, to, memory, good, MEMORY, False, HALF)


@triton.jit
def row_sums(
    lies, moving, scale, shift, vectors, kept,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, PROJECT: tl.constexpr,
    EXTERNAL: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
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
        mu = tl.load(vectors + spec.MU * width + i, mask=known, other=0.0)
        alpha = tl.load(vectors + spec.ALPHA * width + i, mask=known, other=1.0)
        spread = tl.load(vectors + spec.SPREAD * width + i, mask=known, other=1.0)
        fresh = tl.load(vectors + spec.FRESH * width + i, mask=known, other=1.0)
        u = alpha * mu
        on_v = on_v_at(grad, c, lies, here, scale, alpha, shift, u, EXTERNAL, EVEN)
        d = on_v
        if MOMENTUM > 0:
            _, d = pushed(on_v, tl.load(buffer + c, mask=here, other=0.0), MOMENTUM, NESTEROV)
        squares += on_v * on_v
        step = alpha * d
        along += mu * step
        stretch += fresh * step * step
        if PROJECT:
            bend += fresh * alpha * u * step
        w = kept * tl.load(weight + c, mask=here, other=0.0).to(tl.float32)
        means += mu * w
        lengths += w * w * spread
    return tl.reduce((squares, along, stretch, means, lengths, bend), 0, all_sums)  # warps wait for each other once


@triton.jit(do_not_specialize=SIZES)
def add_up(
    addresses, shapes, settings, owner, vectors, layers, sums, motion, ok, width, units,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, PROJECT: tl.constexpr,
    EXTERNAL: tl.constexpr, KIND: tl.constexpr, RULE_KIND: tl.constexpr, BLOCK: tl.constexpr, VERSION: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK // 2
    unit = tl.program_id(0)
    p, s, _settings, layer = tables_of(unit, addresses, shapes, settings, owner, layers)
    flags, moving, row, scale, even, lies = row_of(unit, p, s, layer, width, EXTERNAL, KIND, RULE_KIND)
    if EXTERNAL:  # guards bound layers alone, and the rule has made the step
        lies = without_columns(lies, (flags & spec.PLAIN) != 0)
    shift = 0.0
    direction = 0.0
    level = 0.0
    if tl.load(p + spec.LEVEL) != 0:
        level = tl.load(pointer(tl.load(p + spec.LEVEL), KIND) + row).to(tl.float32)
    if EXTERNAL:
        if (flags & spec.BIASED) != 0:
            step = pointer(tl.load(p + spec.BIAS_FROM_RULE), RULE_KIND) + row * tl.load(s + spec.BIAS_RULE_ROW)
            direction = tl.load(step).to(tl.float32) * tl.load(layer + spec.CONSTANT)
    elif (flags & spec.BIASED) != 0:
        shift = scale * tl.load(pointer(tl.load(p + spec.BIAS_GRAD), KIND) + row).to(tl.float32)
        direction = shift
        if MOMENTUM > 0:
            old = tl.load(pointer(tl.load(p + spec.BIAS_BUFFER), KIND) + row)
            _, direction = pushed(shift, old, MOMENTUM, NESTEROV)
    square = shift * shift
    kept = tl.load(layer + spec.KEPT)
    if (flags & spec.BIASED) != 0:  # not a frozen one
        level *= kept
    at = sums + unit
    if PROJECT:
        kappa = 0.0
        norm2 = 0.0
        bent2 = 0.0
        if (flags & (spec.BIASED | spec.WHITENED)) == spec.WHITENED:
            kappa, norm2, bent2, back = projected(lies, vectors, scale, HALF)
            if not EXTERNAL:
                shift = back
        tl.store(at + spec.KAPPA * units, kappa)
        tl.store(at + spec.NORM2 * units, norm2)
        tl.store(at + spec.BENT2 * units, bent2)
    if even:
        squares, along, stretch, means, lengths, bend = row_sums(
            lies, moving, scale, shift, vectors, kept,
            MOMENTUM, NESTEROV, PROJECT, EXTERNAL, True, BLOCK,
        )  # fmt: skip
    else:
        squares, along, stretch, means, lengths, bend = row_sums(
            lies, moving, scale, shift, vectors, kept,
            MOMENTUM, NESTEROV, PROJECT, EXTERNAL, False, HALF,
        )  # fmt: skip
    tl.store(at + spec.GRAD2 * units, square + squares)
    tl.store(at + spec.ALONG * units, along)
    tl.store(at + spec.STRETCH * units, stretch)
    tl.store(at + spec.MEAN * units, level + means)
    tl.store(at + spec.LENGTH2 * units, lengths)
    tl.store(at + spec.DIRECTION * units, direction)
    tl.store(at + spec.SHIFT * units, shift)
    if PROJECT:
        tl.store(motion + spec.GAIN * units + unit, bend)  # until `measure` reads it


@triton.jit
def move_row(
    lies, moving, scale, shift, vectors, left, gain, back,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, EXTERNAL: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns, inputs, inner, base, width, weight, grad, buffer = lying(lies, EVEN)
    for begin in range(0, columns, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        here = c < columns
        i, known = base + input_at(c, columns, inputs, inner, EVEN), here & moving
        alpha = tl.load(vectors + spec.ALPHA * width + i, mask=known, other=1.0)
        u = alpha * tl.load(vectors + spec.MU * width + i, mask=known, other=0.0)
        on_v = on_v_at(grad, c, lies, here, scale, alpha, shift, u, EXTERNAL, EVEN)
        w = tl.load(weight + c, mask=here, other=0.0).to(tl.float32)
        d = on_v
        if MOMENTUM > 0:
            held, d = pushed(on_v, tl.load(buffer + c, mask=here, other=0.0), MOMENTUM, NESTEROV)
            tl.store(buffer + c, held, mask=here)
        tl.store(weight + c, left * w + gain * alpha * (d - back * u), mask=here)


@triton.jit(do_not_specialize=SIZES)
def move(
    addresses, shapes, settings, owner, vectors, layers, sums, motion, ok, width, units,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, PROJECT: tl.constexpr,
    EXTERNAL: tl.constexpr, KIND: tl.constexpr, RULE_KIND: tl.constexpr, BLOCK: tl.constexpr, VERSION: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK // 2
    if tl.load(ok) == 0:
        return
    unit = tl.program_id(0)
    p, s, g, layer = tables_of(unit, addresses, shapes, settings, owner, layers)
    flags, moving, row, scale, even, lies = row_of(unit, p, s, layer, width, EXTERNAL, KIND, RULE_KIND)
    shift = tl.load(sums + spec.SHIFT * units + unit)
    gain, back = tl.load(motion + spec.GAIN * units + unit), tl.load(motion + spec.BACK * units + unit)
    ratio, kept = tl.load(g + spec.RATIO), tl.load(layer + spec.KEPT)
    left = kept * (1 - tl.load(g + spec.RATE) * ratio * tl.load(g + spec.DECAYED))
    if NESTEROV:
        if row == 0:  # UnitStep's squares have been averaged
            mass, decay = floats(tl.load(p + spec.SQUARE_MASS)), tl.load(g + spec.MEMORY)
            tl.store(mass, decay * tl.load(mass) + (1 - decay))
    if (flags & spec.BIASED) != 0:
        at = pointer(tl.load(p + spec.LEVEL), KIND) + row
        left_bias = kept * (1 - tl.load(g + spec.BIAS_RATE) * ratio * tl.load(g + spec.BIAS_DECAYED))
        tl.store(at, tl.load(at).to(tl.float32) * left_bias + tl.load(motion + spec.BIAS_STEP * units + unit))
        if MOMENTUM > 0:
            at = pointer(tl.load(p + spec.BIAS_BUFFER), KIND) + row
            tl.store(at, MOMENTUM * tl.load(at).to(tl.float32) + shift)
    if even:
        move_row(lies, moving, scale, shift, vectors, left, gain, back, MOMENTUM, NESTEROV, EXTERNAL, True, BLOCK)
    else:
        move_row(lies, moving, scale, shift, vectors, left, gain, back, MOMENTUM, NESTEROV, EXTERNAL, False, HALF)
