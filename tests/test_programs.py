"""Random training programs: in any order of calls, nothing crashes, is skipped or turns NaN."""

import copy
import warnings
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenstep
from cases import OPTIMIZERS
from helpers import Forward, is_finite, through_a_file
from rules import deep_network

CLEAR = 1e-4  # a gradient this large must move its parameter


def language(inner):
    """Tokens, attention or a recurrent layer, a norm, a bare scale."""

    def forward(self, x):
        x = self.inner(self.embed(x))
        return self.head(self.norm(x[0] if isinstance(x, tuple) else x) * self.scale[0]).mean(1)

    parts = {"embed": nn.Embedding(11, 8), "inner": inner, "norm": nn.LayerNorm(8), "head": nn.Linear(8, 3)}
    return Forward(forward, **parts, scale=nn.ParameterList([torch.ones(8)]))


def shared():
    """Two layers that share a weight, one that is called twice, and one that no forward uses."""
    layers = [nn.Linear(6, 6) for _ in range(4)]
    layers[1].weight = layers[0].weight
    layers[0].spare = layers[2]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[3], nn.Tanh(), layers[3], nn.Linear(6, 3))


def mixed():
    """With bias and without, normalized weights, an operation in place."""
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    last = nn.Linear(8, 3, bias=False)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), normed, nn.ReLU(inplace=True), last)


MODELS = {
    "mixed": mixed,
    "shared": shared,
    "batchnorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "images": lambda: deep_network().float(),
    "attention": lambda: language(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
    "recurrent": lambda: language(nn.GRU(8, 8, batch_first=True)),
}
SHAPES = {"images": (2, 4, 4), "attention": (5,), "recurrent": (5,)}
SEQUENCES = ("attention", "recurrent")
LAYOUTS = (torch.contiguous_format, torch.channels_last)
OFTEN = ("step", "step", "accumulate")
ON_PURPOSE = ("a gradient is not finite", "has a gradient but saw no input", "recommended to use torch")  # warnings


class Program(NamedTuple):
    """A network, an optimizer with its flags, and what is called in which order, each with a number."""

    network: str
    case: str
    dtype: torch.dtype
    flags: dict[str, Any]
    groups: str
    seed: int
    operations: list[tuple[str, int]]


def assert_runs(program):
    """Run all of it, checked after every call; warnings are errors, but for those of what was done on purpose."""
    torch.manual_seed(program.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for said in ON_PURPOSE:
            warnings.filterwarnings("ignore", f".*{said}")
        machine = Machine(program)
        for name, number in program.operations:
            OPERATIONS[name](machine, number)
            assert is_finite(machine.model) and all(p.isfinite().all() for p in machine.spare)
            for state in machine.optimizer.state.values():
                assert all(not torch.is_tensor(v) or v.isfinite().all() for v in state.values())


class Machine:
    """The state of a running program."""

    def __init__(self, program):
        self.program, self.case = program, OPTIMIZERS[program.case]
        self.model = MODELS[program.network]().to(program.dtype)
        self.spare = []
        self.optimizer = self.build()

    def build(self):
        flags = {**self.case.keywords, **self.program.flags}
        if flags.pop("tensor_lr", False):
            flags["lr"] = torch.tensor(flags["lr"])
        if self.program.groups == "module":
            optimizer = self.case.cls(self.model, **flags)
        else:
            groups = {"list": list(self.model.parameters()), "decay": evenstep.decay_groups(self.model, 0.1)}
            optimizer = self.case.cls(groups[self.program.groups], model=self.model, **flags)
        for p in self.spare:
            self.add(optimizer, p)
        return optimizer

    def add(self, optimizer, p):
        named = self.program.groups == "decay"  # torch wants names for all or none; decay_groups has them
        optimizer.add_param_group({"params": [("spare", p) if named else p], "weight_decay": 0.01})

    def parameters(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def inputs(self, rows):
        shape = (rows, *SHAPES.get(self.program.network, (6,)))
        if self.program.network in SEQUENCES:
            return torch.randint(0, 11, shape)
        return torch.randn(shape).to(self.program.dtype) + 0.5

    def loss(self, rows=6, forward=None, factor=1.0):
        x, t = self.inputs(rows), torch.randn(rows, 3)
        out = (forward or self.model)(factor * x if x.is_floating_point() else x)
        return ((out.float() - t).tanh().square().sum() + sum(p.sum() for p in self.spare)) / max(1, rows)

    def backward(self, loss):
        if loss.requires_grad:  # all may be frozen
            loss.backward()

    def step(self, loss=None, clip=False):
        """Take a step: parameters with a clear gradient move, those without one stay."""
        if loss is not None:
            self.optimizer.zero_grad()
            self.backward(loss)
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        before = {p: p.detach().clone() for p in self.parameters()}
        self.optimizer.step()
        if not all(p.grad is None or p.grad.isfinite().all() for p in before):
            return
        still = {p for p, old in before.items() if torch.equal(p, old)}
        assert all(p in still for p in before if p.grad is None), "moved without a gradient"
        if self.program.dtype != torch.bfloat16:  # which may round a step away
            stuck = [p for p in still if p.grad is not None and p.grad.abs().max() > CLEAR]
            assert all(self.bias_took_it(p, still) for p in stuck), "a gradient, and no step"

    def bias_took_it(self, weight, still):
        """A weight whose inputs are constant in a batch has no step of its own in centred coordinates: its bias has."""
        owners = [m for m in self.model.modules() if getattr(m, "weight", None) is weight]
        return any(getattr(m, "bias", None) is not None and m.bias not in still for m in owners)

    def evaluate(self, number):
        self.model.eval()
        self.loss(factor=100.0)
        self.model.train()

    def zero(self, number):
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.step()

    def save_and_load(self, number):
        saved = through_a_file(self.optimizer.state_dict())
        if number % 2:
            self.optimizer.detach()
            self.optimizer = self.build()
        self.optimizer.load_state_dict(saved)

    def train_a_copy(self, number):
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        self.backward(model(self.inputs(4)).float().sum())
        repr(optimizer)

    def freeze(self, number):
        layers = [m for m in self.model.modules() if list(m.parameters(recurse=False))]
        layers[number % len(layers)].requires_grad_(False)

    def new_group(self, number):
        self.spare.append(nn.Parameter(torch.randn(3, 2, dtype=self.program.dtype)))
        self.add(self.optimizer, self.spare[-1])

    def not_a_number(self, number):
        before = [p.detach().clone() for p in self.parameters()]
        self.backward(self.loss() * float("nan"))
        self.optimizer.step()
        if any(p.grad is not None and not p.grad.isfinite().all() for p in self.parameters()):
            assert all(torch.equal(p, q) for p, q in zip(self.parameters(), before, strict=True))
        self.optimizer.zero_grad()

    def empty(self, number):
        if self.program.network not in ("batchnorm", *SEQUENCES):  # torch itself refuses
            self.optimizer.zero_grad()
            self.backward(self.loss(rows=0))
            self.optimizer.step()

    def schedule(self, number):
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * (0.5 if number % 2 else 1.5)

    def recompute(self, number):
        reentrant = bool(number % 2) and self.program.network not in SEQUENCES

        def forward(x):
            x = x.requires_grad_() if x.is_floating_point() else x
            return checkpoint(self.model, x, use_reentrant=reentrant)

        if any(p.requires_grad for p in self.model.parameters()):
            self.step(self.loss(forward=forward))

    def autocast(self, number):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.program.dtype == torch.float32):
            loss = self.loss()
        self.step(loss)

    def detach_and_attach(self, number):
        self.optimizer.detach()
        if number % 2:
            self.step(self.loss())
        self.optimizer.attach(self.model)

    def look(self, number):
        repr(self.optimizer)
        self.optimizer.fired()
        assert len(self.optimizer.coverage()) == len(self.parameters())


BY_NAME = [
    "evaluate", "zero", "save_and_load", "train_a_copy", "freeze", "new_group", "not_a_number", "empty", "schedule",
    "recompute", "autocast", "detach_and_attach", "look",
]  # fmt: skip
OPERATIONS = {
    **{name: getattr(Machine, name) for name in BY_NAME},
    "step": lambda machine, number: machine.step(machine.loss(rows=4 + number % 3), clip=number > 5),
    "accumulate": lambda machine, number: machine.backward(machine.loss(rows=2 + number % 4)),
    "clear": lambda machine, number: machine.optimizer.zero_grad(set_to_none=bool(number % 2)),
    "without grad": lambda machine, number: torch.no_grad()(machine.loss)(factor=100.0),
    "thaw": lambda machine, number: machine.model.requires_grad_(True),
    "refresh": lambda machine, number: machine.optimizer.refresh(),
    "lay out anew": lambda machine, number: machine.model.to(memory_format=LAYOUTS[number % 2]),
}


@st.composite
def programs(draw):
    names, case = st.sampled_from([*OPERATIONS, *OFTEN]), draw(st.sampled_from(sorted(OPTIMIZERS)))
    flags = {
        "foreach": st.sampled_from([None, True, False]),
        "maximize": st.booleans(),
        "weight_decay": st.sampled_from([0.0, 0.05]),
        "trust": st.sampled_from([None, 0.1]),
        "tensor_lr": st.booleans(),
        "exclude": st.sampled_from([(), ("*0*",), ("*bias",)]),
    }
    if OPTIMIZERS[case].keywords.get("base") is not torch.optim.AdamW:  # capturable on a GPU alone
        flags["capturable"] = st.booleans()
    return Program(
        network=draw(st.sampled_from(sorted(MODELS))),
        case=case,
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        flags=draw(st.fixed_dictionaries({}, optional=flags)),
        groups=draw(st.sampled_from(["module", "list", "decay"])),
        seed=draw(st.integers(0, 2**16)),
        operations=draw(st.lists(st.tuples(names, st.integers(0, 7)), min_size=4, max_size=14)),
    )


@settings(max_examples=100)
@given(programs())
def test_random_programs_run(program):
    assert_runs(program)
