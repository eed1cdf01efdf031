"""What the keywords of all optimizers mean, said once: in their docstrings and in docs/api.md."""

import inspect
from typing import TypeVar

Class = TypeVar("Class", bound=type)

MEANING = {
    "params": "the model itself, or what torch takes: tensors, groups, named parameters",
    "lr": "stepsize: a number or a one-element tensor",
    "model": "the model to watch, when `params` are tensors or groups",
    "momentum": "of the rule, on v",
    "weight_decay": "decoupled, on w: w shrinks by lr · weight_decay per step",
    "decay": "weight of the old value in running averages",
    "damping": "added to each variance, relative to the layer's mean variance; `EvenStep` damps its units' mean "
    "squares by it, too",
    "fresh_max": "τ of the fresh-max guard; None turns it off",
    "trust": "c of the trust radius; None turns it off",
    "rows": "how many rows of a layer's input a forward looks at, spread over examples and positions; None for all",
    "eps": "μ of eq. 11, absolute, inside the root",
    "plain_lr": "stepsize of parameters outside layers at the `lr` it is given with, None for that of layers; follows "
    "schedules of `lr` and a group's own `lr`, and may be set in a group, too, as of that first `lr`",
    "sharing": "S of every layer, when it is not to be counted",
    "exclude": "name patterns (`fnmatch`) kept in plain coordinates",
    "maximize": "ascend",
    "foreach": "False steps layer by layer; otherwise many layers move at once where they can (`WhitenedSGD`, "
    "`FanInSGD`, `EvenStep`, `Whitened`, which then needs room for two more models within a step, and hands it to its "
    "rule, too)",
    "block": 'what shares a denominator: "network", "unit", "weight"',
    "bounded": "eq. 11's running mean square; False: the batch's own",
    "bias_correction": 'of that running mean; False makes `block="weight"` RMSProp exactly',
    "reduction": 'how the loss reduces the batch: "mean" or "sum"',
    "scaler": "the GradScaler in use, whose factor is taken out of g²",
    "base": "the torch class, or a partial of it",
    "base_kwargs": "the keywords of `base` itself, its `lr` among them",
    "joint": "show the rule a layer as one matrix, bias as a column; None: for Muon alone",
    "fan_in_power": "a layer's stepsize is divided by this power of its inputs per unit; 0.25 with Adam keeps wide "
    "layers alive",
    "plain": "the rule for parameters outside layers; None: `base`, or AdamW beside Muon",
    "capturable": "`step()` never reads the device; without it `Whitened` alone does so on a GPU (one bool)",
    "process_group": "the processes that train one network: None is the world group if there is one, False reduces "
    "nothing",
}


def explained(cls: Class) -> Class:
    """Let a class's docstring end with the keywords of its constructor, their defaults and what they mean."""
    if cls.__doc__ is None:  # python -OO
        return cls
    lines = [inspect.cleandoc(cls.__doc__), "", "Keywords:", ""]
    for name, parameter in list(inspect.signature(cls).parameters.items()):
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" (default {parameter.default!r})"
        lines.append(f"    {stars}{name}{default}: {MEANING[name]}.")
    cls.__doc__ = "\n".join(lines)
    return cls
