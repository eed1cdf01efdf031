"""CUDA graphs capture and replay whole training steps, and no step waits for the device."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import evenstep
from cases import OPTIMIZERS, WideEvenStep
from evenstep.kernels import replay
from helpers import assert_same, every_optimizer, layer_statistics, mean_and_variance, states, still, weights

pytestmark = pytest.mark.gpu
COMPILED = ["unitstep", "canonical", "whitened-muon"]  # test_compile.py compiles all on the CPU
WATCHED = ["unitstep", "canonical", "whitened-adamw"]


def rate(case):
    """A stepsize that is small for every optimizer; the paper's canonical coordinates have no damping to rely on."""
    return case.keywords["lr"] / (10 if case.keywords.get("damping") != 0.0 else 1000)


def network():
    """Batch norm comes after the ReLU: a bias right before it has a gradient of rounding alone, which Adam follows."""
    convs = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2, bias=False)]
    return nn.Sequential(*convs, nn.ReLU(), nn.Flatten(), nn.Linear(54, 8), nn.ReLU(), nn.Linear(8, 3)).cuda()


def batches(count):
    return [torch.randn(32, 2, 5, 5, device="cuda") + 0.5 for _ in range(count)]


def step(forward, optimizer, x):
    """The captured operations; gradients stay where the last replay put them."""
    forward(x).square().mean().backward()
    optimizer.step()


def train(forward, optimizer, xs):
    for x in xs:
        optimizer.zero_grad()
        step(forward, optimizer, x)


def captured(model, optimizer, xs):
    """A function that replays a whole step on a batch: captured after steps on a side stream, as torch wants them."""
    still, graph, stream = xs[0].clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in xs:
            still.copy_(x)
            optimizer.zero_grad(set_to_none=True)
            step(model, optimizer, still)
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step(model, optimizer, still)

    def replay(x):
        still.copy_(x)
        graph.replay()

    return replay


@pytest.mark.feature("CUDA graphs")
@every_optimizer
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_captured_step_is_an_eager_one(case, scheduled):
    """A schedule reaches it through a tensor for lr."""
    eager = network()
    graphed = copy.deepcopy(eager)
    xs = batches(9)
    rates = [torch.tensor(rate(case), device="cuda") if scheduled else rate(case) for _ in range(2)]
    one, two = (case.build(m, lr=lr, capturable=True) for m, lr in zip((eager, graphed), rates, strict=True))
    replay = captured(graphed, two, xs[:3])
    train(eager, one, xs[:3])
    if scheduled:
        for lr in rates:
            lr.mul_(0.25)
    for x in xs[3:]:
        replay(x)
    train(eager, one, xs[3:])
    assert_same(eager, graphed, rtol=1e-3, atol=1e-4)
    for p, q in zip(eager.parameters(), graphed.parameters(), strict=True):
        assert one.state[p].keys() == two.state[q].keys()
        for key in one.state[p].keys() & {"step", "mass", "sharing"}:
            assert_close(two.state[q][key], one.state[p][key])


@pytest.mark.feature("CUDA graphs")
@every_optimizer
@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
def test_no_step_waits_for_the_device(case, capturable):
    model = network()
    optimizer = case.build(model, lr=rate(case), capturable=capturable)
    xs = batches(8)
    train(model, optimizer, xs[:3])
    before = weights(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, optimizer, xs[3:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not all(still(model, before)), "the steps moved nothing"


@pytest.mark.feature("CUDA graphs")
@pytest.mark.parametrize("case", [OPTIMIZERS[k] for k in WATCHED], ids=WATCHED)
def test_hooks_run_inside_the_graphs_of_reduce_overhead(case):
    eager = network()
    watched = copy.deepcopy(eager)
    xs, lr = batches(8), rate(case)
    one, two = case.build(eager, lr=lr), case.build(watched, lr=lr)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(watched, mode="reduce-overhead", fullgraph=True)
    for x in xs:
        torch.compiler.cudagraph_mark_step_begin()
        train(eager, one, [x])
        train(compiled, two, [x])
    if case.cls is not evenstep.CanonicalSGD:  # its backward pass writes g² as well
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_same(eager, watched, rtol=5e-3, atol=5e-4)
    moments = [(p, q) for p, q in zip(eager.parameters(), watched.parameters(), strict=True) if "mx" in one.state[p]]
    for p, q in moments:
        assert_close(two.state[q]["mx"], one.state[p]["mx"], rtol=5e-3, atol=5e-4)
    assert len(moments) == 4


@pytest.mark.feature("compiled model")
@pytest.mark.parametrize(
    ("mixed", "layout"), [(False, torch.contiguous_format), (True, torch.channels_last)], ids=["float32", "bfloat16"]
)
def test_compiled_code_calls_the_moments_kernel_for_batches_of_any_size(mixed, layout):
    """There is one operation per layer, no more graphs than without evenstep, and the sums are those of eager hooks."""
    eager = network().to(memory_format=layout)
    watched, graphs = copy.deepcopy(eager), []

    def noting(graph, inputs):
        graphs.append(sum("add_moments" in str(node.target) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(watched, backend=noting, fullgraph=True)
    optimizers = evenstep.UnitStep(eager, rows=40), evenstep.UnitStep(watched, rows=40)
    for size in (32, 32, 24, 9, 33):
        x = torch.randn(size, 2, 5, 5, device="cuda").to(memory_format=layout) + 0.5
        for call, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
                output = call(x)
            output.float().square().mean().backward()
        rounding = {"rtol": 0.02, "atol": 0.02} if mixed else {"rtol": 1e-4, "atol": 1e-4}
        for one, other in zip(*(layer_statistics(o).values() for o in optimizers), strict=True):
            assert_close(other.tally, one.tally)
            found = (mean_and_variance(layer) for layer in (other, one))
            assert_close(*found, **rounding)
        for optimizer in optimizers:
            optimizer.step()
        watched.load_state_dict(eager.state_dict())
    assert graphs == [4, 4], "the second graph takes batches of any size"


@pytest.mark.feature("compiled step")
@pytest.mark.parametrize("case", [OPTIMIZERS[k] for k in COMPILED], ids=COMPILED)
def test_a_compiled_step_on_the_device_is_an_eager_one(case):
    eager = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).cuda()  # small: compiles soon
    compiled = copy.deepcopy(eager)
    xs = batches(5)
    one, two = (case.build(m, lr=torch.tensor(rate(case), device="cuda")) for m in (eager, compiled))
    torch._dynamo.reset()
    step = torch.compile(two.step)
    train(eager, one, xs)
    for x in xs:
        two.zero_grad()
        compiled(x).square().mean().backward()
        step()
    assert_same(eager, compiled, rtol=5e-3, atol=5e-4)


def offload(model, optimizer):
    """Bring state to the CPU and back, so that it lies elsewhere."""
    for state in optimizer.state.values():
        for name, value in list(state.items()):
            if isinstance(value, torch.Tensor) and value.is_cuda:
                state[name] = value.cpu().cuda()


def move_weights(model, optimizer):
    for p in model.parameters():
        p.data = p.data.clone()


def change_lr(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.003


def reload(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def freeze(model, optimizer):
    model[3].weight.requires_grad_(False)


def spoil(model, optimizer):
    """A NaN in the gradients of the step to come."""
    model[0].weight.register_post_accumulate_grad_hook(spoil_once(model))


def spoil_once(model):
    done = []

    def hook(p):
        if not done:
            p.grad[0, 0] = torch.nan
            done.append(True)

    return hook


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("change", [None, offload, move_weights, change_lr, reload, freeze, spoil])
def test_replayed_steps_are_eager_ones_whatever_changes_between_them(change, monkeypatch):
    """EvenStep's directions are recorded after a few steps, and replayed."""
    eager = network()
    replayed, xs = copy.deepcopy(eager), batches(16)
    one, two = WideEvenStep(eager, lr=0.01), WideEvenStep(replayed, lr=0.01)
    for model, optimizer, warm_up in ((eager, one, 10**6), (replayed, two, 3)):
        monkeypatch.setattr(replay, "WARM_UP", warm_up)
        train(model, optimizer, xs[:7])
        if change is not None:
            change(model, optimizer)
        train(model, optimizer, xs[7:])
    assert one._plan.replay.graph is None and two._plan.replay.graph is not None
    assert one.nonfinite_steps == two.nonfinite_steps == int(change is spoil)
    assert_same(replayed, eager, rtol=1e-4, atol=1e-5)
    for name, value in states(two, replayed).items():
        assert_close(value, states(one, eager)[name], rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
