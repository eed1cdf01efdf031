"""One network on several processes: DDP replicas stay equal bit for bit, and equal one process on the joined batch."""

import copy
import itertools
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import evenstep
import ranks
from cases import OPTIMIZERS
from helpers import Forward, assert_all_moved, assert_same, descend, every_optimizer, same, still, weights

CLOSE = {"rtol": 1e-6, "atol": 1e-8}
FSDP_JOBS = "sharded_equals_replicated", "sharded_with_nan_on_one_rank", "sharded_in_bf16"
DDP_JOBS = "equals_one_process", "replicas_stay_equal", "nan_on_one_rank", "one_rank_without_rows"


def network():
    """Convolutions of all kinds, a norm, layers with and without bias, one of a single row."""

    def forward(self, x):
        x = self.up(torch.tanh(self.grouped(torch.tanh(self.conv(x))))).mean((2, 3))
        return self.out(torch.tanh(self.hidden(self.norm(x))))

    convs = {"conv": nn.Conv2d(2, 6, 3), "grouped": nn.Conv2d(6, 4, 2, padding=1, groups=2)}
    up, norm = nn.ConvTranspose2d(4, 3, 2, stride=2), nn.LayerNorm(3)
    return Forward(forward, **convs, up=up, norm=norm, hidden=nn.Linear(3, 7, bias=False), out=nn.Linear(7, 1))


def batches(number, size, dtype=torch.float64):
    """Images, and what to predict of them; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    x = 3 + torch.randn(number, size, 2, 4, 4, generator=generator)
    return list(zip(x.to(dtype), x.mean((2, 3, 4))[..., None].to(dtype), strict=True))


def shared(*sizes):
    """This rank's share of `batches`."""
    return [(ranks.share(x), ranks.share(y)) for x, y in batches(*sizes)]


def steps(model, optimizer, data):
    """Train on whole batches."""
    for x, y in data:
        descend(optimizer, mse_loss(model(x), y))


def skip_a_step(optimizer):
    """A step on gradients that are not finite, with its warning."""
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()


def same_everywhere(model, optimizer):
    """Whether weights and state are the same on all ranks, bit for bit."""
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))]
    return all(torch.equal(t, tensors_of) for t in tensors for tensors_of in ranks.gathered(t))


def equals_one_process(case):
    model = network().double()
    alone = copy.deepcopy(model)
    steps(alone, case.build(alone, process_group=False), batches(8, 6))
    optimizer = case.build(model)
    steps(DistributedDataParallel(model), optimizer, shared(8, 6))
    assert_same(model, alone, **CLOSE)


def replicas_stay_equal(case):
    model = network()
    optimizer = case.build(model)
    ddp, start = DistributedDataParallel(model), weights(model)
    for k, (x, y) in enumerate(batches(50, 7, torch.float32)):
        size = 3 if k % 5 == 4 else 7  # the last batch of an epoch: one rank has two images, the other one
        optimizer.zero_grad()
        for late in (False, True) if k % 3 else (True,):
            with nullcontext() if late else ddp.no_sync():
                mse_loss(ddp(ranks.share(x[:size])), ranks.share(y[:size])).backward()
        optimizer.step()
    assert same_everywhere(model, optimizer)
    assert_all_moved(model, start)


def nan_on_one_rank(case):
    """Gradients are not averaged here, so that a rank has them for itself."""
    model = network()
    optimizer = case.build(model)
    ddp = DistributedDataParallel(model)
    data = shared(4, 6, torch.float32)
    steps(ddp, optimizer, data[:2])
    before = copy.deepcopy([dict(model.state_dict()), dict(optimizer.state_dict())])
    for averaged in (True, False):
        x, y = data[2]
        optimizer.zero_grad()
        with nullcontext() if averaged else ddp.no_sync():
            mse_loss(ddp(x if ranks.rank() == 0 else x * float("nan")), y).backward()
        skip_a_step(optimizer) if averaged else optimizer.step()  # warned of once
        assert same([dict(model.state_dict()), dict(optimizer.state_dict())], before)
    assert optimizer.nonfinite_steps == 2
    steps(ddp, optimizer, data[3:])
    assert same_everywhere(model, optimizer)


def one_rank_without_rows(case):
    """In the first step and in a later one; then neither has any, and nothing moves."""
    model = network()
    optimizer = case.build(model)
    ddp = DistributedDataParallel(model)
    for k, (x, y) in enumerate(batches(4, 4, torch.float32)):
        number = 0 if ranks.rank() == k % 2 else 4
        descend(optimizer, ((ddp(x[:number]) - y[:number]) ** 2).sum())
        assert same_everywhere(model, optimizer)
    before = weights(model)
    descend(optimizer, ddp(x[:0]).sum())
    moved = not all(still(model, before))
    assert moved == (case.cls is evenstep.BlockNaturalSGD and bool(case.keywords.get("momentum")))


def whole_weights(model):
    """Copies of all parameters, gathered from their shards."""
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in weights(model)]


def fully_sharded(model, **options):
    """The model under FSDP2; the layer of one row leaves one of two ranks without any."""
    fully_shard(model.hidden, **options)
    return fully_shard(model, **options)


def sharded_equals_replicated(case):
    data = shared(8, 6)
    model = network().double()
    twin = copy.deepcopy(model)
    steps(DistributedDataParallel(model), case.build(model, exclude=["up.*"]), data)
    optimizer = case.build(fully_sharded(twin))
    assert any("not its units" in row.reason for row in optimizer.coverage()) or optimizer.coordinates.name == "plain"
    steps(twin, optimizer, data)
    assert_close(whole_weights(twin), list(model.parameters()), **CLOSE)
    for p in twin.parameters():
        for name, value in optimizer.state[p].items():
            of_rows = name not in ("mx", "vx", "mg2", "line_square", "radius") and value.shape[:1] == p.shape[:1]
            assert isinstance(value, DTensor) == of_rows, name


def sharded_with_nan_on_one_rank(case):
    model = network().double()
    optimizer = case.build(fully_sharded(model))
    data = shared(3, 6)
    steps(model, optimizer, data[:1])
    before = whole_weights(model)
    optimizer.zero_grad()
    mse_loss(model(data[1][0]), data[1][1]).backward()
    if ranks.rank() == 1:
        model.conv.weight.grad.to_local().fill_(float("nan"))
    skip_a_step(optimizer)
    assert optimizer.nonfinite_steps == 1
    assert all(map(torch.equal, whole_weights(model), before))
    steps(model, optimizer, data[2:])
    assert not any(map(torch.equal, whole_weights(model), before))


def sharded_in_bf16(case):
    model = fully_sharded(network(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = case.build(model)
    before = whole_weights(model)
    steps(model, optimizer, shared(5, 6, torch.bfloat16))
    for p, q in zip(whole_weights(model), before, strict=True):
        assert p.dtype == torch.float32 and p.isfinite().all() and not torch.equal(p, q)
    for state in optimizer.state.values():
        for name in sorted({"mx", "vx"} & set(state)):
            assert state[name].dtype == torch.float32
            assert all(torch.equal(state[name], other) for other in ranks.gathered(state[name]))


def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def trained(case, folder):
    """Train, save with DCP, go on: the weights at the end."""
    model = fully_sharded(network().double())
    optimizer = case.build(model)
    data = shared(6, 6)
    steps(model, optimizer, data[:3])
    checkpoint.save(state_of(model, optimizer), checkpoint_id=folder)
    steps(model, optimizer, data[3:])
    return whole_weights(model)


def resumed(case, folder):
    """Another network that goes on from there, with its share of the same batches."""
    torch.manual_seed(1)
    model = fully_sharded(network().double())
    optimizer = case.build(model)
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    steps(model, optimizer, shared(6, 6)[3:])
    return whole_weights(model)


def other_groups():
    """A group of one rank trains alone; False reduces nothing; ranks with different layers raise."""
    mine = [dist.new_group([k]) for k in range(2)][ranks.rank()]
    x, y = batches(1, 4)[0]
    results = []
    for group in (mine, False):
        torch.manual_seed(0)
        model = network().double()
        optimizer = evenstep.UnitStep(model, process_group=group)
        steps(model, optimizer, [(x + ranks.rank(), y)])
        results.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*results)
    assert not torch.equal(*ranks.gathered(results[0]))
    optimizer = evenstep.UnitStep(nn.Linear(2 + ranks.rank(), 2))
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(2, 2 + ranks.rank())
    with pytest.raises(RuntimeError, match="train different layers"):
        optimizer.step()


def moments_of_uneven_batches():
    """E[g²] of a mean and of a summed loss, moments and sharing are those of the joined batch, however it is shared."""
    x, y = (t[:5] for t in batches(1, 6)[0])
    for reduction in ("mean", "sum"):
        results = []
        for process_group, part in ((False, lambda t: t), (None, ranks.share)):
            torch.manual_seed(0)
            model = network().double()
            optimizer = evenstep.CanonicalSGD(model, lr=0.01, reduction=reduction, process_group=process_group)
            net = model if process_group is False else DistributedDataParallel(model)
            mse_loss(net(part(x)), part(y), reduction=reduction).backward()
            optimizer.step()
            results.append((optimizer.state_dict()["state"], weights(model)))
        (alone, expected), (shared_out, found) = results
        for key in alone:
            for name in {"mx", "vx", "mg2", "mass", "sharing"} & set(alone[key]):
                assert_close(alone[key][name], shared_out[key][name], msg=f"{reduction} {name}")
        if reduction == "sum":  # every example then has the same weight, whichever rank has it
            assert_close(expected, found)


def moments_far_from_zero():
    """Each rank starts at a row of its own; sums about zero would lose the variance in float32."""
    model = nn.Linear(3, 2)
    optimizer = evenstep.WhitenedSGD(model)
    x = 3e4 + torch.randn(64, 3)
    model(ranks.share(x)).sum().backward()
    optimizer.step()
    assert_close(optimizer.state[model.weight]["vx"], x.double().var(0, correction=0).float(), rtol=1e-4, atol=0)


def tensor_parallel():
    """Split along its units a layer is whitened as ever; split along its inputs it is plain, and listed."""
    for cls in (evenstep.UnitStep, evenstep.WhitenedSGD, evenstep.BlockNaturalSGD):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        twin = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
        optimizer, alone = cls(model), cls(twin, exclude=["2.*"], process_group=False)
        reasons = {row.parameter: row.reason for row in optimizer.coverage()}
        split = "its weight is sharded along its inputs"
        assert reasons == {"0.weight": "", "0.bias": "", "2.weight": split, "2.bias": split}, reasons
        for _ in range(4):
            data = [(torch.randn(8, 4).double(), torch.randn(8, 2).double())]
            steps(model, optimizer, data)
            steps(twin, alone, data)
        assert_close(whole_weights(model), list(twin.parameters()))
    optimizer.detach()
    canonical = evenstep.CanonicalSGD(model)
    with pytest.raises(RuntimeError, match="need the whole output of a layer"):
        steps(model, canonical, data)


def hybrid_sharding():
    """Sharded within a group of ranks, replicated between them."""
    data = shared(3, 6)
    model = network().double()
    twins = [copy.deepcopy(model) for _ in range(2)]
    steps(DistributedDataParallel(model), evenstep.UnitStep(model, exclude=["up.*"]), data)
    for twin, shape in zip(twins, ((1, 2), (2, 1)), strict=True):
        fully_sharded(twin, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
        steps(twin, evenstep.UnitStep(twin), data)
        assert_close(whole_weights(twin), list(model.parameters()), **CLOSE)


def sharded_after_the_optimizer_was_built():
    """As Accelerate does: parameters are replaced in the groups."""
    results = []
    for late in (False, True):
        torch.manual_seed(0)
        model = network().double()
        names = [name for name, _ in model.named_parameters()]
        optimizer = evenstep.UnitStep(model) if late else None
        fully_sharded(model)
        if late:
            optimizer.param_groups[0]["params"] = [model.get_parameter(name) for name in names]
        steps(model, optimizer or evenstep.UnitStep(model), shared(3, 6))
        results.append(whole_weights(model))
    assert_close(*results)


def joined(jobs, names):
    """Jobs of the cases `names`, for `ranks.run`."""
    return [(globals()[job], (OPTIMIZERS[name],)) for name in names for job in jobs]


ONCE = [
    moments_of_uneven_batches,
    moments_far_from_zero,
    tensor_parallel,
    hybrid_sharding,
    sharded_after_the_optimizer_was_built,
    other_groups,
]


def test_two_processes(tmp_path):
    """All in one job, since starting processes takes longer than what they do."""
    jobs = [*joined(DDP_JOBS, ["unitstep"]), *((job, ()) for job in ONCE)]
    for (job, _), *both in zip(jobs, *ranks.run(tmp_path, 2, jobs), strict=True):
        assert both == [None, None], "\n".join([job.__name__, *map(str, both)])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What both ranks return of every job with every case; all jobs of a kind are run when one is asked for."""

    @cache
    def run(jobs):
        both = ranks.run(tmp_path_factory.mktemp(jobs[0]), 2, joined(jobs, OPTIMIZERS))
        return dict(zip(itertools.product(OPTIMIZERS, jobs), zip(*both, strict=True), strict=True))

    return run


KINDS = [
    pytest.param(jobs, job, marks=pytest.mark.feature(feature), id=job)
    for feature, jobs in (("DDP", DDP_JOBS), ("FSDP2", FSDP_JOBS))
    for job in jobs
]


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "job"), KINDS)
@every_optimizer
def test_every_optimizer_on_replicas_and_shards(case, jobs, job, results):
    name = next(name for name, other in OPTIMIZERS.items() if other is case)
    assert results(jobs)[name, job] == (None, None)


@pytest.fixture(scope="module")
def reshaped(tmp_path_factory):
    """The weights of every case: trained by 2 processes, then by those of 2, 1 and 3 that have loaded halfway."""
    folder, found = tmp_path_factory.mktemp("reshaped"), {}
    for world, function in ((2, trained), (2, resumed), (1, resumed), (3, resumed)):
        jobs = [(function, (case, str(folder / name))) for name, case in OPTIMIZERS.items()]
        results = ranks.run(folder / f"{function.__name__}-{world}", world, jobs)
        found[function.__name__, world] = results[0]
    return found


@pytest.mark.slow
@pytest.mark.feature("DCP")
@pytest.mark.parametrize("world", [1, 2, 3])
@every_optimizer
def test_a_checkpoint_goes_on_with_any_number_of_processes(case, world, reshaped):
    k = list(OPTIMIZERS.values()).index(case)
    exactly = {"rtol": 0, "atol": 0} if world == 2 else CLOSE
    found, expected = reshaped["resumed", world][k], reshaped["trained", 2][k]
    assert not isinstance(found, str), found
    assert_close(found, expected, **exactly)


@pytest.mark.parametrize("group", [True, 3, "world"])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(ValueError, match=r"process_group must be None \(the world group\), False .*; got"):
        evenstep.UnitStep(nn.Linear(2, 2), process_group=group)
