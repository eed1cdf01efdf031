"""torch.compile: a compiled model is watched as an eager one, and a compiled step moves as an eager one."""

import copy
import itertools
import pickle
import shutil
from functools import cache

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import evenstep
from cases import ONE_EACH, OPTIMIZERS, RUNS_TORCH_RULES
from evenstep.kernels import input_sums as kernel
from evenstep.math.moments import sum_about
from helpers import Forward, assert_same, descend, every_optimizer, layer_statistics, one_of_each_class, tied, twice
from rules import deep_network

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # inductor's own imports
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # dynamo's own, in torch 2.11
]
SOME = [OPTIMIZERS[k] for k in ("unitstep", "canonical", "whitened-adamw")]
some_optimizers = pytest.mark.parametrize("case", SOME, ids=lambda c: c.cls.__name__)
WATCHING = [c for c in ONE_EACH.values() if c.cls is not evenstep.BlockNaturalSGD]
CLOSE = {"rtol": 1e-3, "atol": 1e-5}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


def chain(*layers):
    """Layers in a row, with a forward of its own: hooks on such a model run before the compiled graph."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    return Forward(forward, layers=nn.ModuleList(layers))


def recomputed():
    """A part that is run again in the backward pass."""

    def forward(self, x):
        return self.head(checkpoint(self.part, x, use_reentrant=False).relu())

    return Forward(forward, part=nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), head=nn.Linear(6, 3))


def autocast():
    """Layers that compute in bfloat16."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()

    return Forward(forward, inner=mlp())


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


MODELS = {
    "mlp": (mlp, (6,)),
    "convolutions": (lambda: deep_network().float(), (2, 4, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (5, 8)),
    "called twice": (twice, (3,)),
    "tied": (lambda: tied(nn.Linear(3, 3)), (3,)),
    "checkpointed": (recomputed, (6,)),
    "autocast": (autocast, (6,)),
}
SIZES = [6, 6, 6, 6, 4, 6, 4]  # the last batch of an epoch is smaller


def train(optimizer, model, forward, shape, steps=None):
    """Train with all that may make a compiler look again: evaluation, schedules, a checkpoint, a smaller batch.

    How many graphs there were after each step.
    """
    generator, graphs = torch.Generator().manual_seed(1), []
    for k, size in enumerate(SIZES):
        x = torch.randn(size, *shape, generator=generator) + 0.5
        if k in (2, 5):
            model.eval()
            with torch.no_grad():
                forward(x)
            model.train()
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        next(steps)() if steps else optimizer.step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        for group in optimizer.param_groups:
            group["lr"] *= 0.9  # in place, if it is a tensor
        if k == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return graphs


@pytest.fixture(autouse=True)
def fresh():
    """Each test starts with nothing compiled."""
    forget()


def forget():
    """Forget what was compiled and counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs_of(optimizer, model, shape, compiled):
    """Train a compiled model; how many graphs were compiled, and nothing was broken."""
    forget()
    graphs = train(optimizer, model, compiled, shape)
    assert not torch._dynamo.utils.counters["graph_break"]
    return graphs[-1]


@cache
def graphs_without_hooks(name, backend):
    """How often a model compiles without an optimizer that watches it."""
    build, shape = MODELS[name]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return graphs_of(optimizer, model, shape, torch.compile(model, fullgraph=True, backend=backend))


def assert_compiles_as_eager(case, name, backend, **close):
    """A watched model compiles as often as the same model without hooks, and trains as in eager mode.

    One with a forward of its own has one graph more: its hooks are called before its forward is compiled.
    """
    build, shape = MODELS[name]
    eager, lr = build(), case.keywords["lr"] / 10
    watched = copy.deepcopy(eager)
    train(case.build(eager, lr=lr), eager, eager, shape)
    compiled = torch.compile(watched, fullgraph=True, backend=backend)
    graphs = graphs_of(case.build(watched, lr=lr), watched, shape, compiled)
    apart = not type(eager).__module__.startswith("torch.")
    assert graphs - apart <= graphs_without_hooks(name, backend)
    assert_same(eager, watched, **{"rtol": 1e-5, "atol": 1e-6} | close)


@pytest.mark.feature("compiled model")
@one_of_each_class
def test_a_compiled_model_is_one_graph_and_trains_to_the_same_weights(case):
    """Its hooks depend on what coordinates need, whatever the other options."""
    muon = case.keywords.get("base") is torch.optim.Muon  # its products in bfloat16 make more of rounding
    assert_compiles_as_eager(case, "mlp", "eager", **({"rtol": 0.01, "atol": 1e-4} if muon else CLOSE))


@pytest.mark.feature("compiled model")
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_compiles_as_often_as_without_hooks(name):
    backend = "aot_eager" if name in ("mlp", "checkpointed") else "eager"  # "eager" runs checkpointed parts as they are
    assert_compiles_as_eager(OPTIMIZERS["unitstep"], name, backend)


REAL = [("aot_eager", name) for name in MODELS]
REAL += [
    pytest.param("inductor", name, marks=needs_compiler) for name in ("convolutions", "checkpointed")
]  # it is slow


@pytest.mark.slow
@pytest.mark.feature("compiled model")
@some_optimizers
@pytest.mark.parametrize(("backend", "name"), REAL)
def test_every_kind_of_model_goes_through_real_compilers(case, backend, name):
    rounding = {"rtol": 0.02, "atol": 0.002}  # bfloat16: compiled code rounds elsewhere
    close = rounding if name == "autocast" else CLOSE  # eager sums are added up in another order
    assert_compiles_as_eager(case, name, backend, **close)


@pytest.mark.feature("compiled model")
def test_what_hooks_write_to_lies_where_cuda_graphs_may_write():
    """They take graphs that change inputs only if those stay where they are, and begin at a multiple of 16 bytes."""
    from torch._inductor.compile_fx import compile_fx

    changed = []

    def inner(graph, inputs, static_input_idxs=(), is_backward=False, **options):
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.copy_.default and not is_backward:
                value = node.args[0].meta["val"]
                changed.append(value.shape)
                assert places.index(node.args[0]) in static_input_idxs
                assert value.storage_offset() * value.itemsize % 16 == 0
        return make_boxed_func(graph.forward)

    model = deep_network().float()
    optimizer = evenstep.UnitStep(model)
    compiled = torch.compile(model, fullgraph=True, backend=lambda *graph: compile_fx(*graph, inner_compile=inner))
    with torch._functorch.config.patch(enable_autograd_cache=False):  # to compile even what another run has compiled
        compiled(torch.randn(6, 2, 4, 4)).sum().backward()
    optimizer.step()
    assert sorted(changed) == sorted([(), *[shape for n in (2, 4, 6, 18, 5) for shape in ((1, 2, n), (n,), (4,), ())]])


@pytest.mark.feature("compiled model")
@pytest.mark.parametrize("whole", [True, False], ids=["model compiled", "model eager"])
@pytest.mark.parametrize("part", [True, False], ids=["part compiled", "part eager"])
def test_calls_of_a_part_by_itself_count_their_examples(whole, part):
    """Beside calls of the whole model, in which a layer called twice counts once."""
    model, x = chain(twice(), nn.Linear(3, 3)), torch.randn(16, 3)
    optimizer = evenstep.WhitenedSGD(model)
    forward, body = (
        torch.compile(m, fullgraph=True, backend="eager") if compiled else m
        for m, compiled in ((model, whole), (model.layers[0], part))
    )
    for k in range(4):
        y = forward(x) if k % 2 == 0 else model.layers[1](body(x))
        descend(optimizer, y.square().mean())
        shared = [optimizer.state[m.weight]["sharing"] for m in (model.layers[0].layer, model.layers[1])]
        assert shared == [1 if k % 2 else 2, 1]


def in_place(module, model):
    module.compile(fullgraph=True, backend="eager")
    return model


WAYS = {
    "in place": lambda model: in_place(model, model),
    "block by block": lambda model: in_place(model.layers[0], model),
    "inside a function": lambda model: torch.compile(lambda x: model(x) * 1.0, fullgraph=True, backend="eager"),
    "with any batch size": lambda model: torch.compile(model, fullgraph=True, backend="eager", dynamic=True),
}


@pytest.mark.feature("compiled model")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it by itself
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_compile_is_watched(way):
    eager = chain(chain(nn.Linear(6, 8), nn.ReLU()), chain(nn.Linear(8, 6), nn.ReLU()), nn.Linear(6, 3))
    model = copy.deepcopy(eager)
    train(evenstep.UnitStep(eager), eager, eager, (6,))
    graphs_of(evenstep.UnitStep(model), model, (6,), WAYS[way](model))
    assert_same(eager, model, rtol=1e-5, atol=1e-6)


@pytest.mark.feature("compiled model")
@one_of_each_class
def test_copies_of_a_compiled_model_train_without_the_optimizer(case):
    model, x = mlp(), torch.randn(5, 6)
    optimizer = case.build(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    average = AveragedModel(model)
    for _ in range(2):
        descend(optimizer, compiled(x).square().mean())
        average.update_parameters(model)
    tallies = [layer.tally for layer in layer_statistics(optimizer).values()]
    examples = 5 if case in WATCHING else 0  # of that one call
    loaded = torch.compile(pickle.loads(pickle.dumps(model)), fullgraph=True, backend="eager")
    for twin in (copy.deepcopy(compiled), loaded, torch.compile(average.module, fullgraph=True, backend="eager")):
        twin(x).sum().backward()
        assert all(p.grad is not None for p in twin.parameters())
    assert_close(loaded(x), compiled(x))
    assert all(tally[-1] == examples for tally in tallies)


def assert_applied(optimizer, count):
    """Every layer was applied to so many inputs since the last step."""
    assert all(layer.applied == count for layer in layer_statistics(optimizer).values())


@pytest.fixture
def blind():
    """Dynamo as it comes: it takes no notice of hooks that were not there when it compiled."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        yield


@pytest.mark.feature("compiled model")
@pytest.mark.parametrize("case", WATCHING)
def test_a_model_compiled_before_its_optimizer_is_built_is_compiled_again(blind, case):
    """Also between calls of a model of the same class that has no hooks."""
    x, plain, model = torch.randn(5, 6), mlp(), mlp()
    compiled = [torch.compile(m, backend="eager") for m in (plain, model)]
    for call in compiled:
        call(x)
    optimizer = case.build(model)
    for _ in range(3):
        for call in compiled:
            call(x).sum().backward()
        assert_applied(optimizer, 5)
        optimizer.step()


@pytest.mark.feature("compiled model")
@pytest.mark.parametrize("case", WATCHING)
def test_a_model_that_runs_what_was_compiled_without_hooks_is_warned_of(blind, case):
    """As where Dynamo is loaded after the optimizer was built, and compiles another model of the same class first."""
    model, other, x = mlp(), mlp(), torch.randn(5, 6)
    optimizer = case.build(model)
    torch._dynamo.config.skip_nnmodule_hook_guards = True
    torch.compile(other, backend="eager")(x)
    compiled = torch.compile(model, backend="eager")
    compiled(x).sum().backward()
    unseen = r"layer '0' \(Linear\) has a gradient but saw no input .*_dynamo.reset\(\) helps"
    with pytest.warns(UserWarning, match=unseen):
        optimizer.step()
    torch._dynamo.reset()  # the way out: let it be compiled again
    compiled(x).sum().backward()
    assert_applied(optimizer, 5)


def assert_steps_as_eager(case, backend, tensor=True, **close):
    """The graphs of each step, if compiled ones lead to the same weights; an eager one takes a turn.

    At the end gradients are NaN.
    """
    eager = mlp()
    compiled, lr = copy.deepcopy(eager), case.keywords["lr"]
    for model in (eager, compiled):
        optimizer = case.build(model, lr=torch.tensor(lr) if tensor else lr)
        forget()
        step = optimizer.step if model is eager else torch.compile(optimizer.step, backend=backend)
        graphs = train(optimizer, model, model, (6,), itertools.chain([step] * 4, [optimizer.step], [step] * 2))
        (torch.nan * model(torch.randn(6, 6))).sum().backward()
        step()
        assert optimizer.nonfinite_steps == 1
    assert_same(eager, compiled, **{"rtol": 1e-4, "atol": 1e-6} | close)
    return graphs


skips_a_step = pytest.mark.filterwarnings("ignore:.*a gradient is not finite")


@skips_a_step
@pytest.mark.feature("compiled step")
@every_optimizer
def test_a_compiled_step_is_compiled_once_and_moves_as_an_eager_one(case):
    """With a tensor for lr, which the schedule writes into. torch's rules run between graphs."""
    graphs = assert_steps_as_eager(case, "eager")
    assert graphs[0] == graphs[-1] <= (6 if case.cls in RUNS_TORCH_RULES else 1)


@skips_a_step
@pytest.mark.feature("compiled step")
@some_optimizers
def test_a_number_for_lr_is_compiled_once_more_when_it_changes(case):
    """As with torch's own optimizers: the first value is a constant, then it becomes an input."""
    graphs = assert_steps_as_eager(case, "eager", tensor=False)
    assert graphs[0] < graphs[1] == graphs[-1] <= 2 * graphs[0]


@pytest.mark.slow
@needs_compiler
@skips_a_step
@pytest.mark.feature("compiled step")
@some_optimizers
def test_inductor_steps_to_the_same_weights(case):
    assert_steps_as_eager(case, "inductor", **CLOSE)


@pytest.mark.feature("compiled step")
def test_a_compiled_step_warns_of_layers_without_statistics():
    model = mlp()
    optimizer = evenstep.UnitStep(model)
    optimizer.detach()
    model(torch.randn(5, 6)).sum().backward()
    with pytest.warns(UserWarning, match="has a gradient but saw no input"):
        torch.compile(optimizer.step, backend="eager")()


def play_the_kernel(call, x, slots, centre, tally, seen, clock):
    """What a GPU's kernel adds up of inputs along dimension 1."""
    rows, zeros, applied, examples = call[2][:4]
    centre.copy_(torch.where(centre.isnan(), x.transpose(0, 1).flatten(1)[:, 0], centre))
    for total, found in zip(slots[0], sum_about(x, centre, 1), strict=True):
        total += found
    tally += torch.tensor([rows, zeros, applied, examples * float(seen != clock)])
    seen.copy_(clock)


@pytest.mark.feature("compiled model")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("by", ["plain operations", "kernel", "kernel, autocast"])
def test_images_in_batches_of_any_size(backend, dynamic, by, monkeypatch):
    """As the last one of an epoch: hooks look at a lattice of positions, whose strides depend on the batch.

    A kernel is called once for each layer, with the tensor that the layer itself reads.
    """
    eager = chain(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    model, served, calls, dtypes = copy.deepcopy(eager), by != "plain operations", [], set()
    if served:
        monkeypatch.setattr(kernel, "serves", lambda x, slots: True)
        monkeypatch.setattr(
            kernel, "launch", lambda call, x, *rest: (dtypes.add(x.dtype), play_the_kernel(call, x, *rest))
        )

    def noting(graph, inputs):
        calls.append(sum("add_moments" in str(node.target) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(model, backend=noting, dynamic=dynamic)
    optimizers = evenstep.UnitStep(eager, rows=20), evenstep.UnitStep(model, rows=20)
    mixed = by == "kernel, autocast"
    for size in (6, 6, 9, 5, 12):
        x = torch.randn(size, 3, 8, 8)
        for call, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                output = call(x)
            (output - 1).square().mean().backward()
        for one, other in zip(*(layer_statistics(o).values() for o in optimizers), strict=True):
            assert_close(other.tally, one.tally)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(eager, model, **({"rtol": 0.05, "atol": 0.02} if mixed else CLOSE))
    if served:
        assert set(calls) <= {0, 2} and calls.count(2) == (1 if dynamic else 2), calls
        assert dtypes == {torch.bfloat16 if mixed else torch.float32}
    else:
        assert not any(calls)
