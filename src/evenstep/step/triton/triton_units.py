# ruff: noqa: D103, SIM102 -- Triton's language has no docstrings, NaN tests or "and" of its own
"""The Triton code of a step along the units of a layer: how far each may move.

Where units do not depend on each other, several programs share those of a block: embeddings have many.
"""

import triton
import triton.language as tl

from . import table_spec as spec
from .triton_pointers import SIZES, floats


@triton.jit
def unit_scale(average, square, mean, eps, one):
    under = tl.maximum(average, square) + mean + eps
    clear = under > spec.TINY
    return tl.where(clear, one / tl.sqrt(tl.where(clear, under, 1.0)), 0.0)


@triton.jit
def measure_pieces(
    u, pieces, sums, motion, squares, units, kept, rate, eps, one, good, BLOCK: tl.constexpr
):  # fmt: skip
    square = tl.zeros([BLOCK], dtype=tl.float32)
    length2 = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, pieces, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        square += tl.load(sums + u * pieces + j, mask=j < pieces, other=0.0)
        length2 += tl.load(sums + spec.LENGTH2 * units + u * pieces + j, mask=j < pieces, other=0.0)
    whole, old = tl.sum(square, 0), tl.load(squares + u)
    average = old + kept * (whole - old)
    step = rate * unit_scale(average, whole, 0.0, eps, one) * tl.maximum(tl.sqrt(tl.sum(length2, 0)), 1.0)
    for begin in range(0, pieces, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        to = motion + u * pieces + j
        tl.store(to + spec.GAIN * units, tl.zeros([BLOCK], dtype=tl.float32) - step, mask=j < pieces)
        tl.store(to + spec.BACK * units, tl.zeros([BLOCK], dtype=tl.float32), mask=j < pieces)
    if good:
        tl.store(squares + u, average)


@triton.jit(do_not_specialize=SIZES)
def measure(
    addresses, shapes, settings, layers, sums, motion, last, fired, ok, units, blocks, floor, one,
    UNIT_SCALE: tl.constexpr, OWN_RATE: tl.constexpr, LINEAR: tl.constexpr, GUARD: tl.constexpr, PROJECT: tl.constexpr,
    BLOCK: tl.constexpr, VERSION: tl.constexpr,
):  # fmt: skip
    block, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    p, s, g = addresses + block * spec.ADDRESSES, shapes + block * spec.SHAPES, settings + block * spec.SETTINGS
    start, count, flags = tl.load(s + spec.START), tl.load(s + spec.UNITS).to(tl.int32), tl.load(s + spec.FLAGS)
    good = tl.load(ok) != 0
    ratio = tl.load(g + spec.RATIO)
    rate, bias_rate = tl.load(g + spec.RATE) * ratio, tl.load(g + spec.BIAS_RATE) * ratio
    if OWN_RATE:  # the rule has made steps of directions
        rate, bias_rate = -1.0, -1.0
    beta = tl.load(layers + block * spec.LAYERS + spec.BETA)
    radius, damping = tl.load(g + spec.RADIUS), tl.load(g + spec.UNIT_DAMPING)
    joint = (radius < float("inf")) | (damping > 0)  # units depend on each other: one program takes all of them
    if joint & (part > 0):
        return
    parts = tl.where(joint, 1, parts)
    squares = floats(tl.load(p + spec.SQUARE))
    kept = 0.0
    mean = 0.0
    if UNIT_SCALE:
        decay = tl.load(g + spec.MEMORY)
        # `move` writes the new mass: other programs read the old one here
        mass = decay * tl.load(floats(tl.load(p + spec.SQUARE_MASS))) + (1 - decay)
        kept = (1 - decay) / mass
        if damping > 0:
            total = tl.zeros([BLOCK], dtype=tl.float32)
            for begin in range(0, count, BLOCK):
                j = begin + tl.arange(0, BLOCK)
                here = j < count
                old = tl.load(squares + j, mask=here, other=0.0)
                total += old + kept * (tl.load(sums + spec.GRAD2 * units + start + j, mask=here, other=0.0) - old)
            mean = damping * tl.sum(total, 0) / count
        pieces = tl.load(s + spec.PIECES).to(tl.int32)
        if pieces > 1:  # rows outside layers that were cut: they depend on their own sums alone
            for u in range(part, count // pieces, parts):
                sums_here, motion_here, eps = sums + start, motion + start, tl.load(g + spec.EPS)
                measure_pieces(
                    u, pieces, sums_here, motion_here, squares, units, kept, rate, eps, one, good, BLOCK
                )  # fmt: skip
            count = 0
    logs = tl.zeros([BLOCK], dtype=tl.float32)
    moves = tl.zeros([BLOCK], dtype=tl.float32)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    held = tl.zeros([BLOCK], dtype=tl.float32)
    bound2 = radius * radius
    SWEEPS: tl.constexpr = 2 if GUARD else 1  # the guards look at all units first
    for sweep in tl.static_range(SWEEPS):
        for begin in range(part * BLOCK, count, parts * BLOCK):
            j = begin + tl.arange(0, BLOCK)
            here = j < count
            at = sums + start + j
            along = tl.load(at + spec.ALONG * units, mask=here, other=0.0)
            scale = beta
            if UNIT_SCALE:
                square = tl.load(at + spec.GRAD2 * units, mask=here, other=0.0)
                old = tl.load(squares + j, mask=here, other=0.0)
                average = old + kept * (square - old)
                scale = unit_scale(average, square, mean, tl.load(g + spec.EPS), one)
                mean_response = tl.load(at + spec.MEAN * units, mask=here, other=0.0)
                length2 = mean_response * mean_response + tl.load(at + spec.LENGTH2 * units, mask=here, other=0.0)
                usual = tl.where((flags & spec.PLAIN) != 0, 1.0, spec.LONG)
                scale *= tl.maximum(tl.sqrt(length2) / usual, 1.0)
            step = rate * scale
            bias_step = bias_rate * scale * tl.load(at + spec.DIRECTION * units, mask=here, other=0.0)
            back = along * 0.0
            factor = along * 0.0 + 1.0
            if PROJECT:
                back = tl.load(at + spec.KAPPA * units, mask=here, other=0.0) * along
            if GUARD:
                level = bias_step
                stretch = tl.load(at + spec.STRETCH * units, mask=here, other=0.0)
                if PROJECT:
                    bend = tl.load(motion + spec.GAIN * units + start + j, mask=here, other=0.0)
                    bent2 = tl.load(at + spec.BENT2 * units, mask=here, other=0.0)
                    alone = (flags & (spec.BIASED | spec.WHITENED)) == spec.WHITENED
                    norm2 = tl.load(at + spec.NORM2 * units, mask=here, other=0.0)
                    level = tl.where(alone, step * (along - back * norm2), level)
                    stretch = tl.where(alone, tl.maximum(stretch - 2 * back * bend + back * back * bent2, 0.0), stretch)
                step2 = level * level + step * step * stretch
                tall = tl.load(at + spec.MEAN * units, mask=here, other=0.0)
                unit2 = tall * tall + tl.load(at + spec.LENGTH2 * units, mask=here, other=0.0)
                relative2 = step2 / tl.maximum(unit2, floor * floor)
                if sweep == 0:
                    moving = here & (relative2 > 0)
                    logs += tl.where(moving, tl.log(tl.where(moving, relative2, 1.0)), 0.0)
                    moves += tl.where(moving, 1.0, 0.0)
                    largest = tl.maximum(largest, tl.where(here, relative2, 0.0))
                else:
                    over = relative2 > bound2
                    factor = tl.where(over, tl.sqrt(bound2 / tl.where(over, relative2, 1.0)), 1.0)
                    held += tl.where(here & over, 1.0, 0.0)
            if sweep == SWEEPS - 1:
                to = motion + start + j
                tl.store(to + spec.GAIN * units, -step * factor, mask=here)
                tl.store(to + spec.BACK * units, back, mask=here)
                tl.store(to + spec.BIAS_STEP * units, (step * along - bias_step) * factor, mask=here)
                if UNIT_SCALE:
                    if good:
                        tl.store(squares + j, average, mask=here)
        if GUARD:
            if not LINEAR:
                if sweep == 0:
                    number = tl.sum(moves, 0)
                    typical2 = tl.exp(tl.sum(logs, 0) / tl.maximum(number, 1.0))
                    crowd2 = tl.maximum(spec.CROWD * spec.CROWD * typical2, bound2 * (spec.LEAST * spec.LEAST))
                    bound2 = tl.where(number > 0, tl.minimum(bound2, crowd2), bound2)
    if ((flags & spec.COUNTED) != 0) & (part == 0):  # one program, where several share the units
        mine = tl.load(s + spec.COUNTER) * spec.COUNTERS
        raised = tl.where((flags & spec.WHITENED) != 0, tl.load(layers + block * spec.LAYERS + spec.RAISED), 0.0)
        stopped = tl.sum(held, 0)
        tl.store(last + mine, raised)
        tl.store(last + mine + 1, stopped)
        tl.store(last + mine + 2, tl.where(radius < float("inf"), tl.sqrt(tl.max(largest, 0)), 0.0))
        tl.store(fired + mine, tl.load(fired + mine) + raised)
        tl.store(fired + mine + 1, tl.load(fired + mine + 1) + stopped)
        tl.store(fired + mine + 2, tl.load(fired + mine + 2) + 1)
