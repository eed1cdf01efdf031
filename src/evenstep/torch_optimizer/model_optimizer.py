"""What torch.optim expects of an optimizer, except `step()`: groups, copies, checkpoints; and the model with hooks."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import options
from ..coordinates.coordinates import Coordinates, Statistics
from ..coordinates.fan_in import FanIn
from ..coordinates.whitening import Whitening
from ..model.coverage import Coverage, coverage_of
from ..model.survey import Entry, survey
from ..rules.check_torch_class import TorchClass
from ..rules.rule import GradientRule, Rule
from ..statistics.hooks import ModelStatistics
from ..statistics.layer_statistics import set_centres
from ..step.block import Block, Choice, Group, gather
from . import checkpoint as checkpoints
from .param_groups import follow_model, named, parameters_of, refuse_unsupported
from .rival_optimizers import attached, claim

INSIDE = "evenstep", "torch", "contextlib"  # packages through which a user's call comes here
NONFINITE = "a gradient is not finite; the step is skipped, weights and moments are unchanged."


class ModelOptimizer(Optimizer):
    """An optimizer of parameters, and of the model that they belong to, if it is known."""

    coordinates: ClassVar[type[Coordinates]] = Whitening  # of layers
    rule: Rule = GradientRule()
    _torch_rules: Sequence[TorchClass] = ()
    _copied: ClassVar[tuple[str, ...]] = ()  # attributes that a copy of the optimizer keeps
    process_group: Any = None

    def __init__(
        self, params: Any, defaults: dict[str, Any], model: nn.Module | None = None, process_group: Any = None
    ) -> None:
        """`params` is a module, or what torch takes, then with `model=` or a later `attach`."""
        self._detached()
        options.check(self._owner, {**defaults, "process_group": process_group})
        self.process_group, self._whole = process_group, isinstance(params, nn.Module)
        params, model = parameters_of(self._owner, params, model)
        super().__init__(params, defaults)
        if model is not None:
            self.attach(model)

    def _detached(self) -> None:
        """Begin without a model, as a copy does, too."""
        self._owner = type(self).__name__
        self._statistics = ModelStatistics(None, [], self.coordinates.needs)
        self._coordinates: dict[Any, Coordinates] = {}
        self._members: set[int] = set()  # ids of our parameters that are the model's, or were
        self._left_out: dict[int, str] = {}
        self._whole = False  # whether it was built from a module, so that all its parameters are ours
        self._complete = False  # whether every parameter has its state
        self._warned: set[str] = set()
        self._nonfinite = torch.zeros((), dtype=torch.int64)
        self._loading: dict[Tensor, Any] = {}  # state that is about to be loaded

    def __getstate__(self) -> dict[str, Any]:
        """Groups and state, as torch's, and what the rule needs; never the model or its hooks."""
        own = {k: vars(self)[k] for k in (*self._copied, "_whole", "process_group") if k in vars(self)}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled optimizer has its groups and state, but no model until `attach`."""
        if "_statistics" not in self.__dict__:
            self._detached()
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                if key != "differentiable":  # torch puts that among the defaults of every optimizer it unpickles
                    group.setdefault(key, value)
            if "plain_lr" in group and "plain_at" not in group:  # an older format kept the ratio of the two
                ratio, plain_lr = group.pop("plain_ratio", 1.0), group["plain_lr"]
                group["plain_at"] = plain_lr / ratio if plain_lr and ratio else float(group["lr"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, with the group's hyperparameters checked."""
        model = self._statistics.model
        if self._whole and self.param_groups:  # the other groups have names, so torch wants some here, too
            param_group = {**param_group, "params": named(param_group["params"], model)}
        full = {**self.defaults, **param_group}
        options.check(self._owner, full)
        if "plain_lr" in full:  # of this lr, so that schedules and groups' own lr move it too
            own = "plain_lr" in param_group or not self.defaults["lr"]
            param_group.setdefault("plain_at", float(full["lr"] if own else self.defaults["lr"]))
        super().add_param_group(param_group)
        refuse_unsupported(self._owner, self.param_groups[-1]["params"])
        self._complete = False
        if model is not None and self in attached:
            self.attach(model)

    # the model

    def attach(self, model: nn.Module) -> None:
        """Watch the layers of `model` whose parameters this optimizer trains."""
        name, groups, present = type(model).__name__, self._groups(), {id(p) for p in model.parameters()}
        if not groups.keys() & present:
            raise ValueError(
                f"{self._owner}: none of the parameters of this {name} is in the optimizer; build it from them."
            )
        self.detach()
        self._members = groups.keys() & (present | self._members)
        entries, self._left_out = survey(model, lambda name, p: excluded(groups.get(id(p), {}), name))
        trained = [e for e in entries if any(p is not None and id(p) in groups for p in [e.weight, *e.biases])]
        limits = [groups.get(id(entry.weight), {}).get("rows") for entry in trained]
        self._statistics = ModelStatistics(model, trained, self.coordinates.needs, limits)
        self._complete = False
        self._recentre()
        if (rival := claim(self)) is not None:
            self._warn("rival", rival)
        if self.coordinates.needs:
            self._statistics.attach(self)
            if not trained:
                self._warn("coverage", f"no layer of this {name} is covered: all is plain; opt.coverage() says why.")

    def detach(self) -> None:
        """Take the hooks off the model (to export it, or for good); steps go on with the last moments."""
        attached.discard(self)
        self._statistics.detach()

    def refresh(self) -> None:
        """Look at the model again after surgery on its layers.

        An optimizer that was built from the model drops parameters that have left it, with their state, and takes new
        ones into its first group; parameters that never were the model's stay. One built from parameters keeps those.
        """
        model = self._statistics.model
        if model is None:
            raise RuntimeError(f"{self._owner}: refresh() needs a model; call attach(model) first.")
        if self._whole:
            follow_model(self.param_groups, model, self._members)
            for p in self.state.keys() - {p for group in self.param_groups for p in group["params"]}:
                del self.state[p]
        self.attach(model)

    def _choose(self, group: Group, entry: Entry | None, alone: bool) -> Choice:
        """The coordinates and the rule of a block, and whether it takes `plain_lr`.

        A layer whose input is not visible takes fan-in coordinates, and so do biases that move without their weight.
        """
        rule, needs = self._rule_of(group), self.coordinates.needs
        reads_gradients = needs >= Statistics.GRADIENTS
        if entry is None:
            return self._kept(Coordinates, rule), rule, True
        visible = entry.slot.input_visible and (entry.slot.output_visible or not reads_gradients)
        kind = self.coordinates if (visible and not alone) or not needs else FanIn
        # a stepsize for gradients in canonical coordinates is far too small elsewhere
        return self._kept(kind, rule), rule, reads_gradients and kind is FanIn

    def _rule_of(self, group: Group) -> Rule:
        """The rule of blocks in a group."""
        return self.rule

    def _kept(self, kind: type[Coordinates], rule: Rule, **settings: Any) -> Coordinates:
        """One object per kind of coordinates, so that blocks can be grouped by it."""
        key = kind, rule.linear, *settings.items()
        return self._coordinates.setdefault(key, kind(linear=rule.linear, **settings))

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The group of each parameter, by id."""
        return {id(p): group for group in self.param_groups for p in group["params"]}

    def _blocks(self, trains: Callable[[Tensor], bool], groups: list[Group] | None = None) -> list[Block]:
        return gather(groups or self.param_groups, self._statistics.layers, self._choose, trains)

    # reports

    def coverage(self) -> Coverage:
        """How each parameter is treated: rows (parameter, layer, treatment, reason); prints as a table."""
        blocks, watched = self._blocks(lambda p: p.requires_grad), self._statistics
        about = [*watched.layers], self._left_out, self.state, self._remark
        return coverage_of(self.param_groups, blocks, watched.model, *about)

    def _remark(self, block: Block, p: Tensor) -> str:
        """What the optimizer itself says of a parameter in `coverage()`: the rule that moves it, if it has several."""
        return ""

    def fired(self) -> dict[str, tuple[float, float]]:
        """How often each guard fired since the start, per layer: share of inputs raised, share of units held back."""
        shares: dict[str, tuple[float, float]] = {}
        for block in self._blocks(lambda p: p.requires_grad):
            entry, layer = block.entry, block.statistics
            if entry is not None and layer is not None and not block.alone:
                raised, held, steps = layer.fired.tolist()
                inputs, units = max(1, steps * layer.inputs), max(1, steps * block.units)
                shares[entry.label] = (raised / inputs, held / units)
        return shares

    @property
    def nonfinite_steps(self) -> int:
        """How many steps were skipped because a gradient was not finite (reads the device)."""
        if count := int(self._nonfinite):
            self._warn("nonfinite", NONFINITE)
        return count

    def _warn(self, key: str, message: str) -> None:
        """Tell the user, once."""
        if key not in self._warned:
            self._warned.add(key)
            frame, level = inspect.currentframe(), 1
            while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
                frame, level = frame.f_back, level + 1
            warnings.warn(f"{self._owner}: {message}", stacklevel=level)  # at the user's line

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with a mark of its format and writer. Warns of steps that the device has skipped."""
        _ = self.nonfinite_steps
        return checkpoints.marked(super().state_dict(), self._writer())

    def _writer(self) -> str:
        """The evenstep class that a checkpoint belongs to, for subclasses, too."""
        return next(cls.__name__ for cls in type(self).__mro__ if cls.__module__.startswith("evenstep."))

    def _check(self, state_dict: dict[str, Any], mark: Mapping[str, Any] | None) -> None:
        """Refuse hyperparameters and state that do not fit."""
        pairs = zip(state_dict["param_groups"], self.param_groups, strict=True)
        groups = [{**self.defaults, **saved, "params": live["params"]} for saved, live in pairs]
        for group in groups:
            options.check(self._owner, group)
        names = None if mark else {name for rule in self._torch_rules for name in rule.keeps}
        torchs = bool(self._torch_rules) and all(rule.is_torchs for rule in self._torch_rules)
        own = {**self.coordinates.state, **self.rule.state(0.0)}
        self._loading = checkpoints.saved_of(state_dict, self.param_groups)
        # state is what it would be with the saved options
        blocks = {p: block for block in self._blocks(lambda p: True, groups) for p in block.parameters}
        for group in self.param_groups:
            for name, p in zip(group.get("param_names", range(len(group["params"]))), group["params"], strict=True):
                checkpoints.check_state(f"'{name}'", self._loading[p], p, blocks[p], own, names, torchs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps the dtype it was saved in: torch would round moments to the parameter's.

        A state_dict that does not fit is refused before anything is changed. Parameters in another order are matched by
        name. Values are copied into live tensors where there are any, since CUDA graphs hold those.
        """
        mark = checkpoints.mark_of(state_dict)
        live = {p: dict(self.state[p]) for group in self.param_groups for p in group["params"] if p in self.state}

        def check(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            try:
                if mark is not None:
                    checkpoints.check_mark(mark, self._writer())
                checkpoints.check_structure(loaded, self.param_groups)
                pairs = zip(loaded["param_groups"], self.param_groups, strict=True)
                loaded = {**loaded, "param_groups": [checkpoints.in_order(*pair) for pair in pairs]}
                self._check(loaded, mark)
            except ValueError as error:
                fault = "this state_dict does not fit, and nothing was loaded"
                raise ValueError(f"{self._owner}: {fault}: {error}") from error
            return loaded

        handle = self.register_load_state_dict_pre_hook(check)
        try:
            # torch copies it before the hook, which refuses what is no dict
            super().load_state_dict(state_dict if isinstance(state_dict, Mapping) else {})
            checkpoints.restore(self.state, self._loading, live)
        finally:
            handle.remove()
            self._loading = {}
        self._complete = False
        self._recentre()

    def _recentre(self) -> None:
        """Make hooks sum about the running means, as after a step, and drop the sums so far."""
        self._statistics.clear()
        for layer in self._statistics.layers.values():
            layer.settled = False
        pairs = [(self.state.get(e.weight, {}), layer) for e, layer in self._statistics.layers.items()]
        pairs = [(state, layer) for state, layer in pairs if "mx" in state]
        centres = [torch.where(state["mass"] > 0, state["mx"], torch.nan) for state, _ in pairs]
        set_centres([layer for _, layer in pairs], centres)


def excluded(group: dict[str, Any], name: str) -> str | None:
    """Why a parameter's group leaves it out of its layer; None if it does not."""
    return next((f"excluded by '{p}'" for p in group.get("exclude", ()) if fnmatchcase(name, p)), None)
