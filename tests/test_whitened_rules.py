"""The rules that `Whitened` runs: which it refuses, their state in checkpoints, and layers whose parts come and go."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.prune import l1_unstructured, remove
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cases import OptimizerCase
from evenstep import Whitened
from helpers import assert_resumes, descend, is_finite, randn, still, twins, weights
from oracle import log_cosh
from rules import RULES, TORCHS, Lars, Lion, Shrinking, WithoutRate, deep_network, drifting

NO_CLASS = r"Whitened: base must be a torch\.optim\.Optimizer class; got "
ON_PARAMETERS = "cannot run in whitened coordinates: its step depends on the parameter"


@pytest.mark.parametrize(
    ("base", "keywords", "message"),
    [
        (torch.optim.LBFGS, {}, "Whitened: LBFGS cannot run in whitened coordinates: LBFGS.step.. missing 1 .*closure"),
        (
            torch.optim.SparseAdam,
            {},
            "Whitened: SparseAdam cannot run in whitened coordinates: SparseAdam does not",
        ),
        (torch.optim.ASGD, {}, f"Whitened: ASGD {ON_PARAMETERS}"),
        (torch.optim.Adafactor, {}, f"Whitened: Adafactor {ON_PARAMETERS}"),
        (partial(torch.optim.LBFGS, lr=0.1), {}, "Whitened: LBFGS cannot run in whitened coordinates"),
        (torch.optim.AdamW, {"plain": torch.optim.LBFGS}, "Whitened: LBFGS cannot run in whitened coordinates"),
        (nn.Linear, {}, f"{NO_CLASS}<class"),
        ("AdamW", {}, rf"{NO_CLASS}'AdamW'\."),
        (None, {}, rf"{NO_CLASS}None\."),
        (torch.optim.SGD([torch.zeros(1)]), {}, f"{NO_CLASS}SGD"),
        (torch.optim.SGD, {"betas": (0.9, 0.99)}, "Whitened: SGD does not take these keywords: .*'betas'"),
        (torch.optim.AdamW, {"beta": 0.9, "lr": 0.1}, "Whitened: AdamW does not take these keywords: .*'beta'"),
        (torch.optim.AdamW, {"betas": (1.5, 0.9)}, r"Invalid beta parameter at index 0: 1\.5"),
        (torch.optim.AdamW, {"lr": -1.0}, r"Invalid learning rate: -1\.0"),
        (torch.optim.AdamW, {"trust": 0}, "Whitened: trust must be a finite number > 0, or None to turn it off; got 0"),
        (Lars, {}, f"Whitened: Lars {ON_PARAMETERS}"),
        (Lars, {"lr": 1e-8}, f"Whitened: Lars {ON_PARAMETERS}"),
        (Shrinking, {}, f"Whitened: Shrinking {ON_PARAMETERS}"),
        (Shrinking, {"lr": 1e-3, "shrink": 1e-4}, f"Whitened: Shrinking {ON_PARAMETERS}"),
        (WithoutRate, {}, "Whitened: WithoutRate .*lr"),
    ],
)
def test_bases_and_keywords_that_cannot_serve_are_refused_and_leave_the_model_alone(base, keywords, message):
    model = nn.Linear(3, 2)
    before = weights(model)
    with pytest.raises(ValueError, match=f"^{message}"):
        Whitened(model, base, **keywords)
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert all(still(model, before))


@pytest.mark.parametrize("name", TORCHS)
def test_the_rules_state_is_in_state_dict_and_resumes_bit_exactly(name):
    cls, keywords = TORCHS[name]
    optimizer = assert_resumes(deep_network, OptimizerCase(Whitened, {"base": cls, **keywords}), drifting(6), log_cosh)
    p = nn.Parameter(torch.zeros(2, 2))
    descend(bare := cls([p], **keywords), p.sum())
    assert {k for k, v in bare.state[p].items() if v is not None} <= set(optimizer.state_dict()["state"][0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["AdamW", "RAdam", "RMSprop"])
def test_loading_leaves_the_rules_step_count_where_the_rule_keeps_it(name):
    """On the host, unless capturable: on the device every parameter's step would wait for it."""
    (cls, keywords), models = RULES[name], twins(lambda: nn.Linear(4, 3).cuda())
    optimizers = [Whitened(model, cls, **keywords) for model in models]
    descend(optimizers[0], models[0](torch.randn(5, 4, device="cuda")).sum())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert optimizers[0].state[p]["step"].device == optimizers[1].state[q]["step"].device


def small_network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def small_step(optimizer, model, count=1):
    for _ in range(count):
        descend(optimizer, model(randn(16, 6)).square().mean())


THAW = nn.Module.requires_grad_
CHANGES = {  # what happens to a model, and what undoes it
    "a frozen bias": (lambda model: model[0].bias.requires_grad_(False), THAW),
    "frozen weights": (lambda model: [layer.weight.requires_grad_(False) for layer in model[::2]], THAW),
    "pruning": (lambda model: l1_unstructured(model[0], "weight", 0.3), lambda model: remove(model[0], "weight")),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    ("base", "keywords"),
    [
        (torch.optim.Muon, {}),
        (torch.optim.Muon, {"plain": partial(torch.optim.SGD, lr=0.01, momentum=0.9)}),
        (torch.optim.AdamW, {"joint": True}),
        (torch.optim.AdamW, {"plain": torch.optim.Adamax}),
        (torch.optim.SGD, {"joint": True, "lr": 0.01, "momentum": 0.9}),
        (Lion, {"joint": True}),
    ],
)
def test_a_rule_goes_on_where_parts_of_a_layer_come_and_go(base, keywords, name):
    """And loads its own checkpoints in between."""
    model = small_network()
    optimizer = Whitened(model, base, **keywords)
    change, back = CHANGES[name]
    for alter in (change, back, change):
        small_step(optimizer, model, 2)
        optimizer.zero_grad()
        alter(model)
        if name == "pruning":
            optimizer.refresh()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        small_step(optimizer, model, 2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert is_finite(model)


def test_a_copy_under_muon_steps_before_it_knows_its_model_and_loads_before():
    model = small_network()
    optimizer = Whitened(model, torch.optim.Muon)
    small_step(optimizer, model)
    other, twin = copy.deepcopy((model, optimizer))
    twin.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="no model is attached"):
        small_step(twin, other)
    twin.attach(other)
    small_step(twin, other)
    assert twin.state[other[0].weight].keys() == optimizer.state[model[0].weight].keys()


class Memory(TorchDispatchMode):
    """The tensors made under this mode, and the most bytes of them that lived at once."""

    def __init__(self):
        super().__init__()
        self.made, self.peak = weakref.WeakSet(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        inputs, made = (
            {t.untyped_storage() for t in tree_leaves(some) if torch.is_tensor(t) and not t.is_meta}
            for some in ((args, kwargs), result)
        )
        self.made.update(made - inputs)
        self.peak = max(self.peak, self.now())
        return result

    def now(self):
        return sum(storage.nbytes() for storage in self.made)


def size_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("name", ["SGD", "nesterov", "AdamW", "Muon", "Adagrad"])
def test_a_step_needs_memory_for_three_copies_of_the_model_and_adds_none_to_the_rules_state(name, foreach):
    """Gradients on v, the rule's steps, and what the rule itself takes (`foreach` rules: one more)."""
    (cls, keywords), layers, width = RULES[name], 6, 128
    model = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())])
    with Memory() as kept:
        optimizer = Whitened(model, cls, foreach=foreach, **keywords | {"lr": 1e-6})
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, width)).square().mean().backward()
            with Memory() as peak:
                optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    assert peak.peak <= 3.5 * size_of(model.parameters())
    state = [t for p in model.parameters() for t in optimizer.state[p].values() if torch.is_tensor(t)]
    assert kept.now() - size_of(state) < size_of([model[0].weight]), "more than statistics outlasts a step"
    p = nn.Parameter(torch.zeros(width, width + 1))
    descend(bare := cls([p], **keywords), p.sum())
    rule = size_of(t for t in bare.state[p].values() if torch.is_tensor(t))
    assert size_of(state) <= layers * (rule + 4 * (2 * width + 8))
