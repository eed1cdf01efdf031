"""The optimizer's state of a block, made and described by the schemas of its coordinates and its rule."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..coordinates.coordinates import Field
from ..math.moments import accumulation_dtype
from ..math.polar import rows_are_longer
from ..parallel import dtensor
from .block import Block


def fields_of(block: Block) -> Iterator[tuple[Tensor, str, Field]]:
    """Every tensor that the block's state must have: its parameter, its name, its field."""
    schema = {**block.coordinates.state, **block.rule.state(block.group.get("momentum", 0.0))}
    for name, field in schema.items():
        each = field.per in ("parameter", "count")
        for p in block.parameters if each else [block.weight]:
            yield p, name, field


def shape_of(field: Field, block: Block, p: Tensor) -> torch.Size:
    """The shape of a field, over all ranks."""
    if field.per == "parameter":
        return p.shape
    units, groups, layer = block.units, block.groups, block.statistics
    columns = block.weight.numel() // max(1, units) + len(block.biases)
    shapes: dict[str, list[int]] = {
        "group": [groups],
        "input": [layer.inputs if layer is not None else 0],
        "output": [layer.units if layer is not None else 0],
        "unit": [units],
        "matrix": [units, columns],
        "line": [units if rows_are_longer(units // groups, columns) else groups * columns],
    }
    return torch.Size(shapes.get(field.per, []))


def init_state(states: Any, block: Block) -> None:
    """Give the block's parameters the state they lack, all of it at once: checkpoints need every key.

    State follows a model that has been given another dtype.
    """
    stale = stale_rule_fields(states, block)
    for p, name, field in fields_of(block):
        kept = None if name in stale else states[p].get(name)
        states[p][name] = fresh(field, block, p) if kept is None else kept.to(dtype_of(field, p))


def dtype_of(field: Field, p: Tensor) -> torch.dtype:
    """The dtype of a field."""
    return p.dtype if field.per == "parameter" and not field.wide else accumulation_dtype(p.dtype)


def stale_rule_fields(states: Any, block: Block) -> set[str]:
    """Running means of another shape than the block's: a parameter has joined a layer, or left it."""
    schema = {name: field for name, field in block.rule.state(0.0).items() if field.per != "parameter"}
    p, kept = block.weight, states[block.weight]
    wrong = any(n in kept and kept[n].shape != shape_of(f, block, p) for n, f in schema.items())
    return set(schema) if wrong else set()


def fresh(field: Field, block: Block, p: Tensor) -> Tensor:
    """A field's tensor as it is before the first step."""
    shape, dtype = shape_of(field, block, p), dtype_of(field, p)
    if field.per == "parameter":
        return torch.full_like(p, field.initial, dtype=dtype, memory_format=torch.preserve_format)
    if field.per in ("unit", "matrix") and block.has_rows and dtensor.groups_along(p, rows=True):
        own = torch.full([block.local_units, *shape[1:]], field.initial, dtype=dtype, device=p.device)
        return dtensor.placed(own, p, shape)
    return torch.full(shape, field.initial, dtype=dtype, device=p.device)
