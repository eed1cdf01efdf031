# ruff: noqa: D103, PLR0124, SIM102 -- Triton's language has no docstrings, NaN tests or "and" of its own
"""The Triton code of `kernels.step`: rows of its tables by number, as written out there."""

import triton
import triton.language as tl

SIZES = ("width", "units", "blocks")


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


@triton.jit
def all_sums(a, b, c, d, e, f, a2, b2, c2, d2, e2, f2):
    return a + a2, b + b2, c + c2, d + d2, e + e2, f + f2


@triton.jit
def input_at(column, columns, inputs, inner):
    found = column
    if inputs != columns:  # a kernel's positions share an input, or all columns have none
        found = (column // inner) % inputs
    return found


@triton.jit(do_not_specialize=SIZES)
def frame(
    addresses, shapes, settings, vectors, fresh, layers, width, blocks,
    LINEAR: tl.constexpr, STEADY: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    p, s, g = addresses + block * 15, shapes + block * 11, settings + block * 13
    flags = tl.load(s + 6)
    if (flags & 16) != 0:
        tally = floats(tl.load(p + 7))
        applied, examples = tl.load(tally + 2), tl.load(tally + 3)
        shared = tl.where(applied > 0, applied / tl.maximum(examples, 1.0), tl.load(floats(tl.load(p + 12))))
        declared = tl.load(g + 11)
        shared = tl.where(declared == declared, declared, shared)
        tl.store(layers + blocks + block, shared)
        if LINEAR:
            tl.store(layers + block, tl.rsqrt(tl.sqrt(tl.load(g + 12) * shared)))
    if (flags & 2) != 0:
        count, base, slots = tl.load(s + 8).to(tl.int32), tl.load(s + 4), tl.load(s + 9).to(tl.int32)
        staged, centre = floats(tl.load(p + 6)), floats(tl.load(p + 8))
        mx, vx = floats(tl.load(p + 9)), floats(tl.load(p + 10))
        rows = tl.load(floats(tl.load(p + 7)))
        started = tl.load(floats(tl.load(p + 11))) > 0
        some = tl.maximum(rows, 1.0)
        bad = tl.zeros([BLOCK], dtype=tl.int32)
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            here = i < count
            slot = tl.arange(0, SLOTS)[:, None]
            filled = here[None, :] & (slot < slots)
            mine = staged + slot * 2 * count + i[None, :]
            first = tl.sum(tl.load(mine, mask=filled, other=0.0), 0)
            second = tl.sum(tl.load(mine + count, mask=filled, other=0.0), 0)
            tl.store(fresh + base + i, first, mask=here)
            tl.store(fresh + width + base + i, second, mask=here)
            finite = (first - first == 0) & (second - second == 0)
            bad += tl.where(here & (finite == 0), 1, 0)
        usable = (tl.sum(bad, 0) == 0) & (rows > 0)
        known = usable | started
        tl.store(layers + 2 * blocks + block, usable.to(tl.float32))
        tau = tl.load(g + 7)
        steady = tl.where((flags & 1) != 0, 0.0, STEADY)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        fired = tl.zeros([BLOCK], dtype=tl.float32)
        tl.debug_barrier()
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            here = i < count
            first = tl.load(fresh + base + i, mask=here, other=0.0)
            second = tl.load(fresh + width + base + i, mask=here, other=0.0)
            c = tl.load(centre + i, mask=here, other=0.0)
            off = first / some
            mean = tl.where(started, tl.load(mx + i, mask=here, other=0.0), c + off)
            var = tl.where(started, tl.load(vx + i, mask=here, other=0.0), tl.maximum(second / some - off * off, 0.0))
            var = tl.maximum(var, steady * mean * mean)
            shift = mean - c
            q = tl.maximum((second - 2 * shift * first + rows * shift * shift) / some, 0.0)
            q = tl.where(usable, q, var)
            raised = tl.maximum(var, q / tau)
            fired += tl.where(here & known & (q / tau > var), 1.0, 0.0)
            total += tl.where(here, raised, 0.0)
            tl.store(vectors + base + i, tl.where(known, mean, 0.0), mask=here)
            tl.store(vectors + 2 * width + base + i, tl.where(known, raised, 1.0), mask=here)
            tl.store(vectors + 3 * width + base + i, tl.where(known, tl.maximum(var, q), 1.0), mask=here)
        tl.store(layers + 3 * blocks + block, tl.sum(fired, 0))
        floor = tl.where(known, tl.load(g + 6) * tl.sum(total, 0) / count, 0.0)
        tl.debug_barrier()
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            here = i < count
            spread = tl.load(vectors + 2 * width + base + i, mask=here, other=1.0) + floor
            clear = spread > 1.1754943508222875e-38
            tl.store(
                vectors + width + base + i,
                tl.where(clear, 1.0 / tl.sqrt(tl.where(clear, spread, 1.0)), 0.0),
                mask=here,
            )
            tl.store(vectors + 2 * width + base + i, spread, mask=here)
            far = tl.load(vectors + 3 * width + base + i, mask=here, other=1.0)
            tl.store(vectors + 3 * width + base + i, far + floor, mask=here)


@triton.jit
def row_of(unit, p, s, beta, KIND: tl.constexpr):
    columns, flags = tl.load(s).to(tl.int32), tl.load(s + 6)
    inputs, inner = tl.load(s + 1).to(tl.int32), tl.load(s + 2).to(tl.int32)
    row = unit - tl.load(s + 5)
    base = tl.load(s + 4) + tl.where((flags & 2) != 0, row // tl.load(s + 3) * inputs, 0)
    weight = pointer(tl.load(p), KIND) + row * columns
    grad = pointer(tl.load(p + 1), KIND) + row * columns
    buffer = pointer(tl.load(p + 2), KIND) + row * columns
    scale = tl.where((flags & 8) != 0, -1.0, 1.0) * tl.load(beta)
    return flags, row, columns, inputs, inner, base, weight, grad, buffer, scale


@triton.jit(do_not_specialize=SIZES)
def add_up(
    addresses, shapes, settings, owner, vectors, layers, sums, motion, ok, width, units,
    MOMENTUM: tl.constexpr, HAS_MOMENTUM: tl.constexpr, AHEAD: tl.constexpr, PROJECT: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    block = tl.load(owner + unit).to(tl.int64)
    p, s = addresses + block * 15, shapes + block * 11
    flags, row, columns, inputs, inner, base, weight, grad, buffer, scale = row_of(unit, p, s, layers + block, KIND)
    shift = 0.0
    direction = 0.0
    level = 0.0
    if tl.load(p + 3) != 0:
        level = tl.load(pointer(tl.load(p + 3), KIND) + row).to(tl.float32)
    if (flags & 1) != 0:
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
            along = tl.zeros([BLOCK], dtype=tl.float32)
            lengths = tl.zeros([BLOCK], dtype=tl.float32)
            bents = tl.zeros([BLOCK], dtype=tl.float32)
            for begin in range(0, columns, BLOCK):
                c = begin + tl.arange(0, BLOCK)
                here = c < columns
                i = base + input_at(c, columns, inputs, inner)
                alpha = tl.load(vectors + width + i, mask=here, other=0.0)
                u = alpha * tl.load(vectors + i, mask=here, other=0.0)
                fresh = tl.load(vectors + 3 * width + i, mask=here, other=0.0)
                along += scale * alpha * u * tl.load(grad + c, mask=here, other=0.0).to(tl.float32)
                lengths += u * u
                bents += alpha * alpha * fresh * u * u
            norm2 = tl.sum(lengths, 0)
            bent2 = tl.sum(bents, 0)
            root = tl.sqrt(1 + norm2)
            kappa = 1 / (root * (1 + root))
            shift = kappa * tl.sum(along, 0)
        tl.store(sums + 8 * units + unit, kappa)
        tl.store(sums + 9 * units + unit, norm2)
        tl.store(sums + 3 * units + unit, bent2)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    along = tl.zeros([BLOCK], dtype=tl.float32)
    stretch = tl.zeros([BLOCK], dtype=tl.float32)
    bend = tl.zeros([BLOCK], dtype=tl.float32)
    means = tl.zeros([BLOCK], dtype=tl.float32)
    lengths = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, columns, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        here = c < columns
        i = base + input_at(c, columns, inputs, inner)
        mu = tl.load(vectors + i, mask=here, other=0.0)
        alpha = tl.load(vectors + width + i, mask=here, other=0.0)
        spread = tl.load(vectors + 2 * width + i, mask=here, other=0.0)
        fresh = tl.load(vectors + 3 * width + i, mask=here, other=0.0)
        u = alpha * mu
        on_v = scale * alpha * tl.load(grad + c, mask=here, other=0.0).to(tl.float32) - shift * u
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
    found = tl.reduce((squares, along, stretch, means, lengths, bend), 0, all_sums)  # warps wait for each other once
    tl.store(sums + unit, square + found[0])
    tl.store(sums + units + unit, found[1])
    tl.store(sums + 2 * units + unit, found[2])
    tl.store(sums + 4 * units + unit, level + found[3])
    tl.store(sums + 5 * units + unit, found[4])
    tl.store(sums + 6 * units + unit, direction)
    tl.store(sums + 7 * units + unit, shift)
    if PROJECT:
        tl.store(motion + unit, found[5])  # until `measure` reads it


@triton.jit(do_not_specialize=SIZES)
def measure(
    addresses, shapes, settings, layers, sums, motion, last, fired, ok, units, blocks, floor, one,
    EVEN: tl.constexpr, GUARD: tl.constexpr, CROWD: tl.constexpr, PROJECT: tl.constexpr, TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    p, s, g = addresses + block * 15, shapes + block * 11, settings + block * 13
    start, count, flags = tl.load(s + 5), tl.load(s + 7).to(tl.int32), tl.load(s + 6)
    good = tl.load(ok) != 0
    rate, bias_rate = tl.load(g) * tl.load(g + 2), tl.load(g + 1) * tl.load(g + 2)
    beta, radius = tl.load(layers + block), tl.load(g + 5)
    squares = floats(tl.load(p + 13))
    kept = 0.0
    mean = 0.0
    if EVEN:
        decay = tl.load(g + 8)
        mass = decay * tl.load(floats(tl.load(p + 14))) + (1 - decay)
        kept = (1 - decay) / mass
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for begin in range(0, count, BLOCK):
            j = begin + tl.arange(0, BLOCK)
            here = j < count
            old = tl.load(squares + j, mask=here, other=0.0)
            average = old + kept * (tl.load(sums + start + j, mask=here, other=0.0) - old)
            total += average
        mean = tl.load(g + 10) * tl.sum(total, 0) / count
        if good:
            tl.store(floats(tl.load(p + 14)), mass)
    logs = tl.zeros([BLOCK], dtype=tl.float32)
    moves = tl.zeros([BLOCK], dtype=tl.float32)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    held = tl.zeros([BLOCK], dtype=tl.float32)
    bound2 = radius * radius
    for turn in tl.static_range(TURNS):
        for begin in range(0, count, BLOCK):
            j = begin + tl.arange(0, BLOCK)
            here = j < count
            at = sums + start + j
            along = tl.load(at + units, mask=here, other=0.0)
            scale = beta
            if EVEN:
                square, old = tl.load(at, mask=here, other=0.0), tl.load(squares + j, mask=here, other=0.0)
                average = old + kept * (square - old)
                under = tl.maximum(average, square) + mean + tl.load(g + 9)
                clear = under > 1.1754943508222875e-38
                scale = tl.where(clear, one / tl.sqrt(tl.where(clear, under, 1.0)), 0.0)
                if (flags & 32) != 0:
                    scale *= tl.maximum(tl.sqrt(tl.load(at + 5 * units, mask=here, other=0.0)), 1.0)
            step = rate * scale
            bias_step = bias_rate * scale * tl.load(at + 6 * units, mask=here, other=0.0)
            back = along * 0.0
            factor = along * 0.0 + 1.0
            if PROJECT:
                back = tl.load(at + 8 * units, mask=here, other=0.0) * along
            if GUARD:
                level = bias_step
                stretch = tl.load(at + 2 * units, mask=here, other=0.0)
                if PROJECT:
                    bend = tl.load(motion + start + j, mask=here, other=0.0)
                    bent2 = tl.load(at + 3 * units, mask=here, other=0.0)
                    alone = (flags & 3) == 2
                    level = tl.where(
                        alone, step * (along - back * tl.load(at + 9 * units, mask=here, other=0.0)), level
                    )
                    stretch = tl.where(alone, tl.maximum(stretch - 2 * back * bend + back * back * bent2, 0.0), stretch)
                step2 = level * level + step * step * stretch
                tall = tl.load(at + 4 * units, mask=here, other=0.0)
                unit2 = tl.maximum(tall * tall + tl.load(at + 5 * units, mask=here, other=0.0), floor * floor)
                relative2 = step2 / unit2
                if turn == 0:
                    moving = here & (relative2 > 0)
                    logs += tl.where(moving, tl.log(tl.where(moving, relative2, 1.0)), 0.0)
                    moves += tl.where(moving, 1.0, 0.0)
                    largest = tl.maximum(largest, tl.where(here, relative2, 0.0))
                else:
                    over = relative2 > bound2
                    factor = tl.where(over, tl.sqrt(bound2 / tl.where(over, relative2, 1.0)), 1.0)
                    held += tl.where(here & over, 1.0, 0.0)
            if turn == TURNS - 1:
                to = motion + start + j
                tl.store(to, -step * factor, mask=here)
                tl.store(to + units, back, mask=here)
                tl.store(to + 2 * units, (step * along - bias_step) * factor, mask=here)
                if EVEN:
                    if good:
                        tl.store(squares + j, average, mask=here)
        if GUARD:
            if CROWD > 0:
                if turn == 0:
                    number = tl.sum(moves, 0)
                    typical2 = tl.exp(tl.sum(logs, 0) / tl.maximum(number, 1.0))
                    crowd2 = tl.maximum(CROWD * CROWD * typical2, bound2 / 100)
                    bound2 = tl.where(number > 0, tl.minimum(bound2, crowd2), bound2)
    if (flags & 4) != 0:
        mine = tl.load(s + 10) * 3
        raised = tl.where((flags & 2) != 0, tl.load(layers + 3 * blocks + block), 0.0)
        stopped = tl.sum(held, 0)
        tl.store(last + mine, raised)
        tl.store(last + mine + 1, stopped)
        tl.store(last + mine + 2, tl.where(radius < float("inf"), tl.sqrt(tl.max(largest, 0)), 0.0))
        tl.store(fired + mine, tl.load(fired + mine) + raised)
        tl.store(fired + mine + 1, tl.load(fired + mine + 1) + stopped)
        tl.store(fired + mine + 2, tl.load(fired + mine + 2) + 1)


@triton.jit(do_not_specialize=SIZES)
def move(
    addresses, shapes, settings, owner, vectors, layers, sums, motion, ok, width, units,
    MOMENTUM: tl.constexpr, HAS_MOMENTUM: tl.constexpr, AHEAD: tl.constexpr, PROJECT: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(ok) == 0:
        return
    unit = tl.program_id(0)
    block = tl.load(owner + unit).to(tl.int64)
    p, s, g = addresses + block * 15, shapes + block * 11, settings + block * 13
    flags, row, columns, inputs, inner, base, weight, grad, buffer, scale = row_of(unit, p, s, layers + block, KIND)
    shift = tl.load(sums + 7 * units + unit)
    gain, back = tl.load(motion + unit), tl.load(motion + units + unit)
    ratio = tl.load(g + 2)
    left = 1 - tl.load(g) * ratio * tl.load(g + 3)
    if (flags & 1) != 0:
        at = pointer(tl.load(p + 3), KIND) + row
        left_bias = 1 - tl.load(g + 1) * ratio * tl.load(g + 4)
        tl.store(at, tl.load(at).to(tl.float32) * left_bias + tl.load(motion + 2 * units + unit))
        if HAS_MOMENTUM:
            at = pointer(tl.load(p + 5), KIND) + row
            tl.store(at, MOMENTUM * tl.load(at).to(tl.float32) + shift)
    for begin in range(0, columns, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        here = c < columns
        i = base + input_at(c, columns, inputs, inner)
        alpha = tl.load(vectors + width + i, mask=here, other=0.0)
        u = alpha * tl.load(vectors + i, mask=here, other=0.0)
        on_v = scale * alpha * tl.load(grad + c, mask=here, other=0.0).to(tl.float32) - shift * u
        d = on_v
        if HAS_MOMENTUM:
            held = MOMENTUM * tl.load(buffer + c, mask=here, other=0.0).to(tl.float32) + on_v
            tl.store(buffer + c, held, mask=here)
            d = held
            if AHEAD:
                d = on_v + MOMENTUM * held
        w = tl.load(weight + c, mask=here, other=0.0).to(tl.float32)
        tl.store(weight + c, left * w + gain * alpha * (d - back * u), mask=here)


@triton.jit(do_not_specialize=SIZES)
def commit(addresses, shapes, settings, fresh, layers, ok, width, blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    p, s, g = addresses + block * 15, shapes + block * 11, settings + block * 13
    flags, good = tl.load(s + 6), tl.load(ok) != 0
    if ((flags & 16) != 0) & good:
        tl.store(floats(tl.load(p + 12)), tl.load(layers + blocks + block))
    if (flags & 2) != 0:
        count, base = tl.load(s + 8).to(tl.int32), tl.load(s + 4)
        centre, mx, vx = floats(tl.load(p + 8)), floats(tl.load(p + 9)), floats(tl.load(p + 10))
        rows = tl.maximum(tl.load(floats(tl.load(p + 7))), 1.0)
        old, decay = tl.load(floats(tl.load(p + 11))), tl.load(g + 8)
        mass = decay * old + (1 - decay)
        k = (1 - decay) / mass
        joins = good & (tl.load(layers + 2 * blocks + block) != 0)
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            here = i < count
            off = tl.load(fresh + base + i, mask=here, other=0.0) / rows
            var = tl.maximum(tl.load(fresh + width + base + i, mask=here, other=0.0) / rows - off * off, 0.0)
            mean, spread = tl.load(mx + i, mask=here, other=0.0), tl.load(vx + i, mask=here, other=0.0)
            d = tl.load(centre + i, mask=here, other=0.0) + off - mean
            mean = tl.where(joins, mean + k * d, mean)
            spread = tl.where(joins, (1 - k) * spread + k * var + k * (1 - k) * d * d, spread)
            tl.store(mx + i, mean, mask=here)
            tl.store(vx + i, spread, mask=here)
            tl.store(centre + i, tl.where(joins | (old > 0), mean, float("nan")), mask=here)
        tl.debug_barrier()
        tl.store(floats(tl.load(p + 11)), tl.where(joins, mass, old))
