"""The tables that the kernels read: where each block's numbers are, their shapes, and settings."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...coordinates.coordinates import Statistics
from ...rules.rule import plain_share
from ..block import Block
from . import table_spec as spec

LONG, FEW = 16384, 264  # columns of a row that one program would be long with, unless there are many rows
PIECE, LEAST = 1024, 64  # columns of a piece of such a row, at most and at least
ALIGNED = 16  # elements: what a rule sees begins at multiples of these
FAST = 8  # rows and columns of a rule's matrices are multiples of this: 16 bytes of bfloat16, which GPUs multiply fast


def whitened(block: Block) -> bool:
    """Whether its coordinates have moments."""
    return block.coordinates.needs >= Statistics.INPUTS


def inner(block: Block) -> int | None:
    """The distance in memory between two inputs of a row of the weight; None if units are not rows."""
    m = block.layout(block.weight)
    if m.data_ptr() != block.weight.data_ptr():
        return None
    return m.shape[3] if m.is_contiguous() else 1 if m.transpose(2, 3).is_contiguous() else None


def pieces(block: Block, units: int, columns: int) -> int:
    """Into how many rows of their own programs take a row; 1 if it is taken whole, 0 if there is no good way.

    Rows of a layer are taken whole: the guards need sums over all of a row.
    """
    if columns <= LONG or units >= FEW:
        return 1
    lengths = [n for n in range(PIECE, LEAST - 1, -1) if columns % n == 0] if block.entry is None else []
    even = [n for n in lengths if n % 8 == 0]
    return columns // (even or lengths)[0] if lengths else 0


def aligned(number: int, to: int = ALIGNED) -> int:
    """The next multiple of `to`.

    >>> aligned(17)
    32
    """
    return -(-number // to) * to


class Place(NamedTuple):
    """Where a rule sees a block in the buffers that all share, and the distances between rows, and biases."""

    start: int
    bias: int
    row: int
    bias_row: int


def padded(block: Block) -> tuple[int, int, int]:
    """How a rule of matrices sees a block, [group, unit, column], sizes rounded up to what GPUs multiply fast."""
    columns = block.weight.numel() // block.units + len(block.biases)
    units = block.units // block.groups  # groups follow each other without a gap
    return block.groups, aligned(units, FAST) if block.groups == 1 else units, aligned(columns, FAST)


def places_of(blocks: Sequence[Block]) -> tuple[list[Place], int]:
    """The place of each block, and the size of the buffers."""
    found, end = list[Place](), 0
    for block in blocks:
        columns, biased, size = block.weight.numel() // block.units, len(block.biases), block.weight.numel()
        if block.rule.matrices:
            groups, units, row = padded(block)
            found.append(Place(end, end + columns, row, row))
            end += groups * units * row
        elif block.rule.joint(block):
            found.append(Place(end, end + columns, columns + biased, columns + biased))
            end += aligned(size + block.units * biased)
        else:
            found.append(Place(end, end + aligned(size), columns, 1))
            end += aligned(size) + aligned(block.units * biased)
    return found, end


def shapes_table(blocks: Sequence[Block], places: Sequence[Place]) -> tuple[list[list[int]], int, int]:
    """The table of shapes, and how many inputs and units there are. Inputs of a block begin at a multiple of 8."""
    rows, counters, width, total = list[list[int]](), 0, 0, 0
    for block, place in zip(blocks, places, strict=True):
        groups, units, inputs, area = block.layout(block.weight).shape
        moments, cut = whitened(block), pieces(block, groups * units, inputs * area)
        row = [0] * spec.SHAPES
        row[spec.BASE], row[spec.START] = width, total
        row[spec.COLUMNS], row[spec.UNITS] = inputs * area // cut, groups * units * cut
        row[spec.INPUTS], row[spec.ALL_INPUTS] = (inputs, groups * inputs) if moments else (1, 0)
        row[spec.INNER], row[spec.PER_GROUP], row[spec.PIECES] = inner(block) or 1, units, cut
        row[spec.RULE_ROW], row[spec.BIAS_RULE_ROW] = place.row // cut, place.bias_row
        row[spec.FLAGS] = spec.BIASED * bool(block.biases) + spec.MAXIMIZE * bool(block.group["maximize"])
        row[spec.FLAGS] += spec.WHITENED * moments + spec.PLAIN * (block.entry is None)
        row[spec.FLAGS] += spec.TURNED * (block.rule.joint(block) and inner(block) == 1 < area)
        row[spec.COUNTER] = -1
        if block.statistics is not None:
            row[spec.SLOT_COUNT] = len(block.statistics.slots) if moments else 0
            row[spec.COUNTER] = counters
            row[spec.FLAGS] += spec.COUNTED + spec.SHARED * ("sharing" in block.coordinates.state)
            counters += 1
        rows.append(row)
        width, total = width + -(-row[spec.ALL_INPUTS] // 8) * 8, total + row[spec.UNITS]
    return rows, width, total


# what the table of settings depends on, beside lr
SETTINGS = ("maximize", "weight_decay", "plain_lr", "plain_at", *(name for name, _ in spec.OF_GROUP.values()))


def settings_table(blocks: Sequence[Block]) -> list[list[float]]:
    """The table of settings; a stepsize that is a tensor on another device is 0."""
    rows = []
    for block in blocks:
        group, row = block.group, [0.0] * spec.SETTINGS
        for column, decay_column, own in zip(
            (spec.RATE, spec.BIAS_RATE), (spec.DECAYED, spec.BIAS_DECAYED), block.param_groups, strict=False
        ):
            lr = own["lr"]
            row[column] = 0.0 if isinstance(lr, Tensor) and not lr.is_cpu else float(lr)
            row[decay_column] = own["weight_decay"]
        for column, (name, none) in spec.OF_GROUP.items():
            row[column] = none if group.get(name) is None else group[name]
        if block.statistics is None:
            row[spec.RADIUS] = torch.inf
        row[spec.UNIT_DAMPING] = 0.0 if block.entry is None else row[spec.DAMPING]
        row[spec.RATIO] = plain_share(group) if block.uses_plain_lr else 1.0
        row[spec.FAN_IN] = float(block.fan_in)
        rows.append(row)
    return rows
