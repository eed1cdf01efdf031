"""What feeds what in a model: established from a torch.fx trace or an nn.Sequential, never guessed from names."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import fx, nn

Calls = dict[nn.Module, list[fx.Node]]


class Wiring:
    """How the modules of a model are connected; the model is left as it was.

    `paths` and `names` are all places of a module and of a parameter (by id); `calls` has for each trace the calls of
    each module, and `failure` says why there is no trace; `read` are the parameters that a forward uses without calling
    their module; `sources` gives the module whose output another takes, `cut` what it takes if that is no such output.
    `doubted` are sources in an nn.Sequential that may be called part by part: no trace tells.
    """

    def __init__(
        self, model: nn.Module, leaves: tuple[type[nn.Module], ...], chains: tuple[type[nn.Module], ...]
    ) -> None:
        """`leaves` are not looked into; modules of the types `chains` call their children one after the other.

        A chain that is no plain nn.Sequential is always called as a whole.
        """
        self.model = model
        self.paths = gathered((module, path) for path, module in model.named_modules(remove_duplicate=False))
        self.names = gathered((id(p), name) for name, p in model.named_parameters(remove_duplicate=False))
        graphs, self.failure = trace(model, leaves)
        self.read = {str(node.target) for graph in graphs for node in graph.find_nodes(op="get_attr")}
        self.calls: list[Calls] = [
            gathered((model.get_submodule(str(n.target)), n) for n in graph.find_nodes(op="call_module"))
            for graph in graphs
        ]
        self.sources: dict[nn.Module, nn.Module] = {}
        self.doubted: dict[nn.Module, nn.Module] = {}
        for path, chain in model.named_modules():
            if isinstance(chain, nn.Sequential) and type(chain).forward in {cls.forward for cls in chains}:
                sure = bool(graphs) or type(chain).forward is not nn.Sequential.forward or called_whole(model, path)
                found = self.sources if sure else self.doubted
                found.update((after, before) for before, after in pairwise(chain))
        self.cut: dict[nn.Module, str] = {}
        for calls in self.calls:
            self._follow(calls)

    def _follow(self, calls: Calls) -> None:
        """A traced call tells more than an nn.Sequential: the output may go, or come from, elsewhere."""
        owner = {node: module for module, nodes in calls.items() for node in nodes}
        for node, module in owner.items():
            inputs = node.all_input_nodes
            if len(inputs) == 1 and inputs[0] in owner:
                self.sources[module] = owner[inputs[0]]
            else:
                self.sources.pop(module, None)
                self.cut[module] = listed(str(n.target if n.op == "placeholder" else n) for n in inputs)

    def where(self, module: nn.Module) -> str:
        """A module for messages: its path and class."""
        return f"'{self.paths[module][0]}' ({type(module).__name__})"

    def why_shared(self, module: nn.Module) -> str | None:
        """Whether `module` is registered or called more than once, or a parameter of it used elsewhere."""
        if len(self.paths[module]) > 1:
            return f"is shared: {listed(self.paths[module])} are one module"
        most = max((len(calls.get(module, ())) for calls in self.calls), default=0)
        if most > 1:
            return f"is shared: it is called {most} times in a forward pass"
        for name, p in module.named_parameters():
            if len(self.names[id(p)]) > 1:
                return f"has a tied {name}: {listed(self.names[id(p)])} are one parameter"
            if self.read.intersection(self.names[id(p)]):
                return f"has a {name} that another forward uses too"
        return None

    def why_not_only(self, module: nn.Module, after: nn.Module) -> str | None:
        """Why the output of `module` does not go to `after` alone in every trace; None if it does."""
        for calls in self.calls:
            users = {user for node in calls.get(module, ()) for user in node.users}
            nodes = set(calls.get(after, ()))
            if users - nodes:
                return f"whose output also goes to {listed(sorted(map(str, users - nodes)))}"
            if nodes - users:
                return "but not whenever the model is called"
        return None


class Tracer(fx.Tracer):
    """Looks into a module only for the leaves inside; buffers stay symbolic, so that no forward can change them."""

    proxy_buffer_attributes = True

    def __init__(self, leaves: tuple[type[nn.Module], ...], answer: bool | None = None) -> None:
        """`leaves` are types; `answer` is given where a forward asks whether a value is true, which fails otherwise."""
        super().__init__()
        self.leaves, self.answer = leaves, answer

    def to_bool(self, obj: fx.Proxy) -> bool:
        """What a forward that depends on its values is told."""
        return super().to_bool(obj) if self.answer is None else self.answer

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """What holds no leaf may do what it likes in its forward."""
        inside = any(isinstance(child, self.leaves) for child in m.modules())
        return isinstance(m, self.leaves) or not inside or super().is_leaf_module(m, module_qualified_name)


def called_whole(model: nn.Module, path: str) -> bool:
    """Whether the nn.Sequential at `path` is called as a module, and none of its parts by itself.

    The module that has it is traced alone, with values that it asks for taken as true, and as false. A model itself is
    called, and so is what an nn.Sequential that is has.
    """
    if not path:
        return True
    owner, _, name = path.rpartition(".")
    while isinstance(holder := model.get_submodule(owner), (nn.ModuleList, nn.ModuleDict)) and owner:
        owner, _, last = owner.rpartition(".")
        name = f"{last}.{name}"
    if type(holder).forward is nn.Sequential.forward:
        return called_whole(model, owner)
    graphs = [trace(holder, (nn.Module,), answer)[0] for answer in (True, False)]
    nodes = [node for some in graphs for graph in some for node in graph.nodes]
    used = [str(node.target) for node in nodes if node.op in ("call_module", "get_attr")]
    return all(graphs) and name in used and not any(target.startswith(f"{name}.") for target in used)


def trace(
    model: nn.Module, leaves: tuple[type[nn.Module], ...], answer: bool | None = None
) -> tuple[list[fx.Graph], str]:
    """The graphs of `model` in eval mode, or why there is none.

    The first has optional arguments at their defaults; the second, where it can be had, has them given.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    graphs: list[fx.Graph] = []
    with as_it_was(model):
        for module in model.modules():
            module.training = False
        for fixed in [defaults, {}] if defaults else [{}]:
            try:
                graphs.append(Tracer(leaves, answer).trace(model, fixed))
            except Exception as error:  # a forward that is given symbols may raise anything
                if not graphs:
                    return [], f"{type(error).__name__}: {error}".partition("\n")[0]
    return graphs, ""


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Give every module its attributes back: a traced forward may set some, and fx adds constants of its own."""
    saved = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)


def gathered(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """All values of each key.

    >>> gathered([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def listed(names: Iterable[str]) -> str:
    """Names for a message.

    >>> listed(["conv", "fc"])
    "'conv', 'fc'"
    """
    return ", ".join(f"'{name}'" for name in names)
