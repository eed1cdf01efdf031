# ruff: noqa: D103, PLR0124 -- Triton's language has no docstrings, NaN tests or "and" of its own
"""The Triton code of `kernels.step` with one program for each layer, along its inputs: frames before, moments after."""

import triton
import triton.language as tl

from .triton_pointers import ADDRESSES, SETTINGS, SHAPES, SIZES, floats


@triton.jit(do_not_specialize=SIZES)
def frame(
    addresses, shapes, settings, vectors, fresh, layers, width, blocks,
    LINEAR: tl.constexpr, STEADY: tl.constexpr, DRIFT: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    p, s, g = addresses + block * ADDRESSES, shapes + block * SHAPES, settings + block * SETTINGS
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
        mass = tl.load(floats(tl.load(p + 11)))
        started, unproven = mass > 0, (1 - mass) * (DRIFT * DRIFT)
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
            q = tl.maximum(tl.where(usable, q, var), unproven * mean * mean)
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


@triton.jit(do_not_specialize=SIZES)
def commit(addresses, shapes, settings, fresh, layers, ok, width, blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    p, s, g = addresses + block * ADDRESSES, shapes + block * SHAPES, settings + block * SETTINGS
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
