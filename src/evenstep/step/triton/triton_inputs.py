# ruff: noqa: D103, PLR0124 -- Triton's language has no docstrings, NaN tests or "and" of its own
"""The Triton code of a step with one program for each layer, along its inputs: coordinates before, moments after."""

import triton
import triton.language as tl

from . import table_spec as spec
from .triton_pointers import SIZES, floats


@triton.jit(do_not_specialize=SIZES)
def frame(
    addresses, shapes, settings, vectors, batch, layers, width, blocks,
    LINEAR: tl.constexpr, PLAIN_SIZE: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr, VERSION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    p, s, g = addresses + block * spec.ADDRESSES, shapes + block * spec.SHAPES, settings + block * spec.SETTINGS
    layer, flags = layers + block * spec.LAYERS, tl.load(s + spec.FLAGS)
    if (flags & spec.SHARED) != 0:
        tally = floats(tl.load(p + spec.TALLY))
        applied, examples = tl.load(tally + spec.USES), tl.load(tally + spec.EXAMPLES)
        shared = tl.where(applied > 0, applied / tl.maximum(examples, 1.0), tl.load(floats(tl.load(p + spec.SHARING))))
        declared = tl.load(g + spec.DECLARED)
        shared = tl.where(declared == declared, declared, shared)
        tl.store(layer + spec.SHARE, shared)
        if LINEAR:
            tl.store(layer + spec.BETA, tl.rsqrt(tl.sqrt(tl.load(g + spec.FAN_IN) * shared)))
    if (flags & spec.WHITENED) != 0:
        count, base = tl.load(s + spec.ALL_INPUTS).to(tl.int32), tl.load(s + spec.BASE)
        slots = tl.load(s + spec.SLOT_COUNT).to(tl.int32)
        staged, centre = floats(tl.load(p + spec.SLOTS)), floats(tl.load(p + spec.CENTRE))
        mx, vx = floats(tl.load(p + spec.MX)), floats(tl.load(p + spec.VX))
        rows = tl.load(floats(tl.load(p + spec.TALLY)) + spec.ROWS)
        mass = tl.load(floats(tl.load(p + spec.MASS)))
        started, unproven = mass > 0, (1 - mass) * (spec.DRIFT * spec.DRIFT)
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
            tl.store(batch + spec.FIRST * width + base + i, first, mask=here)
            tl.store(batch + spec.SECOND * width + base + i, second, mask=here)
            finite = (first - first == 0) & (second - second == 0)
            bad += tl.where(here & (finite == 0), 1, 0)
        usable = (tl.sum(bad, 0) == 0) & (rows > 0)
        known = usable | started
        tl.store(layer + spec.USABLE, usable.to(tl.float32))
        tau = tl.load(g + spec.TAU)
        steady = tl.where((flags & spec.BIASED) != 0, 0.0, spec.STEADY)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        fired = tl.zeros([BLOCK], dtype=tl.float32)
        means = tl.zeros([BLOCK], dtype=tl.float32)
        tl.debug_barrier()
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            here = i < count
            first = tl.load(batch + spec.FIRST * width + base + i, mask=here, other=0.0)
            second = tl.load(batch + spec.SECOND * width + base + i, mask=here, other=0.0)
            c = tl.load(centre + i, mask=here, other=0.0)
            off = first / some
            mean = tl.where(started, tl.load(mx + i, mask=here, other=0.0), c + off)
            var = tl.where(started, tl.load(vx + i, mask=here, other=0.0), tl.maximum(second / some - off * off, 0.0))
            var = tl.maximum(var, steady * mean * mean)
            shift = mean - c
            q = tl.maximum((second - 2 * shift * first + rows * shift * shift) / some, 0.0)
            q = tl.maximum(tl.where(usable, q, var), unproven * mean * mean)
            raised = tl.maximum(var, q / tau)
            fired += tl.where(here & known & (q / tau > var), 1.0, 0.0)
            total += tl.where(here, raised, 0.0)
            means += tl.where(here, mean * mean, 0.0)
            tl.store(vectors + spec.MU * width + base + i, tl.where(known, mean, 0.0), mask=here)
            tl.store(vectors + spec.SPREAD * width + base + i, tl.where(known, raised, 1.0), mask=here)
            tl.store(vectors + spec.FRESH * width + base + i, tl.where(known, tl.maximum(var, q), 1.0), mask=here)
        tl.store(layer + spec.RAISED, tl.sum(fired, 0))
        floor = tl.where(known, tl.load(g + spec.DAMPING) * tl.sum(total, 0) / count, 0.0)
        whitened = tl.zeros([BLOCK], dtype=tl.float32)
        tl.debug_barrier()
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            here = i < count
            raised = tl.load(vectors + spec.SPREAD * width + base + i, mask=here, other=1.0)
            spread = raised + floor
            clear = spread > spec.TINY
            alpha = tl.where(clear, 1.0 / tl.sqrt(tl.where(clear, spread, 1.0)), 0.0)
            whitened += tl.where(here, raised * alpha * alpha, 0.0)
            tl.store(vectors + spec.ALPHA * width + base + i, alpha, mask=here)
            tl.store(vectors + spec.SPREAD * width + base + i, spread, mask=here)
            far = tl.load(vectors + spec.FRESH * width + base + i, mask=here, other=1.0)
            tl.store(vectors + spec.FRESH * width + base + i, far + floor, mask=here)
        if PLAIN_SIZE:
            squares, under = tl.sum(means, 0), tl.sum(whitened, 0)
            power = tl.sum(total, 0) + tl.where((flags & spec.BIASED) != 0, 0.0, squares)
            sized = known & (under > spec.TINY) & (power > spec.TINY)
            beta = tl.where(sized, tl.sqrt(power / tl.where(under > spec.TINY, under, 1.0)), 1.0)
            constant = tl.where(sized, tl.sqrt(1 + squares / count) / beta, 1.0)
            tl.store(layer + spec.BETA, beta)
            tl.store(layer + spec.CONSTANT, constant)


@triton.jit(do_not_specialize=SIZES)
def commit(addresses, shapes, settings, batch, layers, ok, width, blocks, BLOCK: tl.constexpr, VERSION: tl.constexpr):
    block = tl.program_id(0)
    p, s, g = addresses + block * spec.ADDRESSES, shapes + block * spec.SHAPES, settings + block * spec.SETTINGS
    flags, good = tl.load(s + spec.FLAGS), tl.load(ok) != 0
    if ((flags & spec.SHARED) != 0) & good:
        tl.store(floats(tl.load(p + spec.SHARING)), tl.load(layers + block * spec.LAYERS + spec.SHARE))
    if (flags & spec.WHITENED) != 0:
        count, base = tl.load(s + spec.ALL_INPUTS).to(tl.int32), tl.load(s + spec.BASE)
        centre, mx, vx = floats(tl.load(p + spec.CENTRE)), floats(tl.load(p + spec.MX)), floats(tl.load(p + spec.VX))
        rows = tl.maximum(tl.load(floats(tl.load(p + spec.TALLY)) + spec.ROWS), 1.0)
        old, decay = tl.load(floats(tl.load(p + spec.MASS))), tl.load(g + spec.MEMORY)
        mass = decay * old + (1 - decay)
        k = (1 - decay) / mass
        joins = good & (tl.load(layers + block * spec.LAYERS + spec.USABLE) != 0)
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            here = i < count
            off = tl.load(batch + spec.FIRST * width + base + i, mask=here, other=0.0) / rows
            second = tl.load(batch + spec.SECOND * width + base + i, mask=here, other=0.0)
            var = tl.maximum(second / rows - off * off, 0.0)
            mean, spread = tl.load(mx + i, mask=here, other=0.0), tl.load(vx + i, mask=here, other=0.0)
            d = tl.load(centre + i, mask=here, other=0.0) + off - mean
            mean = tl.where(joins, mean + k * d, mean)
            spread = tl.where(joins, (1 - k) * spread + k * var + k * (1 - k) * d * d, spread)
            tl.store(mx + i, mean, mask=here)
            tl.store(vx + i, spread, mask=here)
            tl.store(centre + i, tl.where(joins | (old > 0), mean, float("nan")), mask=here)
        tl.debug_barrier()
        tl.store(floats(tl.load(p + spec.MASS)), tl.where(joins, mass, old))
