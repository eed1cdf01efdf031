"""One network on several processes: DDP replicas stay equal bit for bit, and equal one process on the joined batch."""

import copy
import warnings
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
from helpers import assert_all_moved, assert_same, every_optimizer

QUICK = ["evenstep"]
CLOSE = {"rtol": 1e-6, "atol": 1e-8}
FSDP_JOBS = "sharded_equals_replicated", "sharded_with_nan_on_one_rank", "sharded_in_bf16"
DDP_JOBS = "equals_one_process", "replicas_stay_equal", "nan_on_one_rank", "one_rank_without_rows"


class Net(nn.Module):
    """Convolutions of all kinds, a norm, layers with and without bias, one of a single row."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.grouped = nn.Conv2d(6, 4, 2, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.norm = nn.LayerNorm(3)
        self.hidden = nn.Linear(3, 7, bias=False)
        self.out = nn.Linear(7, 1)

    def forward(self, x):
        x = self.up(torch.tanh(self.grouped(torch.tanh(self.conv(x))))).mean((2, 3))
        return self.out(torch.tanh(self.hidden(self.norm(x))))


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
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()


def same_everywhere(model, optimizer):
    """Whether weights and state are the same on all ranks, bit for bit."""
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))]
    return all(torch.equal(t, tensors_of) for t in tensors for tensors_of in ranks.gathered(t))


def equals_one_process(case):
    model = Net().double()
    alone = copy.deepcopy(model)
    steps(alone, case.build(alone, process_group=False), batches(8, 6))
    optimizer = case.build(model)
    steps(DistributedDataParallel(model), optimizer, shared(8, 6))
    assert_same(model, alone, **CLOSE)
    return True


def replicas_stay_equal(case):
    model = Net()
    optimizer = case.build(model)
    ddp = DistributedDataParallel(model)
    start = [p.detach().clone() for p in model.parameters()]
    for k, (x, y) in enumerate(batches(50, 7, torch.float32)):
        size = 3 if k % 5 == 4 else 7  # the last batch of an epoch: one rank has two images, the other one
        optimizer.zero_grad()
        for late in (False, True) if k % 3 else (True,):
            with nullcontext() if late else ddp.no_sync():
                mse_loss(ddp(ranks.share(x[:size])), ranks.share(y[:size])).backward()
        optimizer.step()
    assert same_everywhere(model, optimizer)
    assert_all_moved(model, start)
    return True


def nan_on_one_rank(case):
    """Gradients are not averaged here, so that a rank has them for itself."""
    model = Net()
    optimizer = case.build(model)
    ddp = DistributedDataParallel(model)
    data = shared(4, 6, torch.float32)
    steps(ddp, optimizer, data[:2])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for averaged in (True, False):
        x, y = data[2]
        optimizer.zero_grad()
        with nullcontext() if averaged else ddp.no_sync():
            mse_loss(ddp(x if ranks.rank() == 0 else x * float("nan")), y).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[0][name]), name
        for key, state in before[1]["state"].items():
            for name, value in state.items():
                assert torch.equal(optimizer.state_dict()["state"][key][name], value), name
    assert optimizer.nonfinite_steps == 2
    steps(ddp, optimizer, data[3:])
    assert same_everywhere(model, optimizer)
    return True


def one_rank_without_rows(case):
    """In the first step and in a later one; then neither has any, and nothing moves but what one rank's loss pulls."""
    model = Net()
    optimizer = case.build(model)
    ddp = DistributedDataParallel(model)
    for k, (x, y) in enumerate(batches(4, 4, torch.float32)):
        number = 0 if ranks.rank() == k % 2 else 4
        optimizer.zero_grad()
        ((ddp(x[:number]) - y[:number]) ** 2).sum().backward()
        optimizer.step()
        assert same_everywhere(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    ddp(x[:0]).sum().backward()
    optimizer.step()
    moved = not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert moved == (case.cls is evenstep.BlockNaturalSGD and bool(case.keywords.get("momentum")))
    scale = model.norm.weight.detach().clone()
    optimizer.zero_grad()
    (ddp(x[:0]).sum() + ranks.rank() * model.norm.weight.square().sum()).backward()
    optimizer.step()
    assert same_everywhere(model, optimizer)
    assert not torch.equal(model.norm.weight, scale)
    return True


def whole_weights(model):
    """Copies of all parameters, gathered from their shards."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def fully_sharded(model, **options):
    """The model under FSDP2; the layer of one row leaves one of two ranks without any."""
    fully_shard(model.hidden, **options)
    return fully_shard(model, **options)


def sharded_equals_replicated(case):
    data = shared(8, 6)
    model = Net().double()
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
    return True


def sharded_with_nan_on_one_rank(case):
    model = Net().double()
    optimizer = case.build(fully_sharded(model))
    data = shared(3, 6)
    steps(model, optimizer, data[:1])
    before = whole_weights(model)
    optimizer.zero_grad()
    mse_loss(model(data[1][0]), data[1][1]).backward()
    if ranks.rank() == 1:
        model.conv.weight.grad.to_local().fill_(float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    assert optimizer.nonfinite_steps == 1
    assert all(map(torch.equal, whole_weights(model), before))
    steps(model, optimizer, data[2:])
    assert not any(map(torch.equal, whole_weights(model), before))
    return True


def sharded_in_bf16(case):
    model = fully_sharded(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = case.build(model)
    before = whole_weights(model)
    steps(model, optimizer, shared(5, 6, torch.bfloat16))
    for p, q in zip(whole_weights(model), before, strict=True):
        assert p.dtype == torch.float32 and p.isfinite().all() and not torch.equal(p, q)
    for state in optimizer.state.values():
        for name in sorted({"mx", "vx"} & set(state)):
            assert state[name].dtype == torch.float32
            assert all(torch.equal(state[name], other) for other in ranks.gathered(state[name]))
    return True


def trained(case, folder):
    """Train, save with DCP, go on: the weights at the end."""
    model = fully_sharded(Net().double())
    optimizer = case.build(model)
    data = shared(6, 6)
    steps(model, optimizer, data[:3])
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(saved, checkpoint_id=folder)
    steps(model, optimizer, data[3:])
    return whole_weights(model)


def resumed(case, folder):
    """Another network that goes on from there, with its share of the same batches."""
    torch.manual_seed(1)
    model = fully_sharded(Net().double())
    optimizer = case.build(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    steps(model, optimizer, shared(6, 6)[3:])
    return whole_weights(model)


def other_groups():
    """A group of one rank trains alone; False reduces nothing; ranks with different layers are told."""
    mine = [dist.new_group([k]) for k in range(2)][ranks.rank()]
    x, y = batches(1, 4)[0]
    results = []
    for group in (mine, False):
        torch.manual_seed(0)
        model = Net().double()
        optimizer = evenstep.UnitStep(model, process_group=group)
        steps(model, optimizer, [(x + ranks.rank(), y)])
        results.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*results)
    assert not torch.equal(*ranks.gathered(results[0]))
    optimizer = evenstep.UnitStep(nn.Linear(2 + ranks.rank(), 2))
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(2, 2 + ranks.rank())
    with pytest.raises(RuntimeError, match="train different layers"):
        optimizer.step()
    whole = dist.new_group([0, 1])
    optimizer = evenstep.UnitStep(Net(), process_group=whole)
    assert copy.deepcopy(optimizer).process_group == whole.group_name
    return True


def moments_of_uneven_batches():
    """E[g²] of a mean and of a summed loss, moments and sharing are those of the joined batch, however it is shared."""
    x, y = (t[:5] for t in batches(1, 6)[0])
    for reduction in ("mean", "sum"):
        states, weights = [], []
        for ddp in (False, True):
            torch.manual_seed(0)
            model = Net().double()
            optimizer = evenstep.CanonicalSGD(model, lr=0.01, reduction=reduction, process_group=None if ddp else False)
            net, mine, target = (
                (DistributedDataParallel(model), ranks.share(x), ranks.share(y)) if ddp else (model, x, y)
            )
            mse_loss(net(mine), target, reduction=reduction).backward()
            optimizer.step()
            states.append(optimizer.state_dict()["state"])
            weights.append(list(model.parameters()))
        for key in states[0]:
            for name in {"mx", "vx", "mg2", "mass", "sharing"} & set(states[0][key]):
                assert_close(states[0][key][name], states[1][key][name], msg=f"{reduction} {name}")
        if reduction == "sum":  # every example then has the same weight, whichever rank has it
            assert_close(*weights)
    return True


def moments_far_from_zero():
    """Each rank starts at a row of its own; sums about zero would lose the variance in float32."""
    model = nn.Linear(3, 2)
    optimizer = evenstep.WhitenedSGD(model)
    x = 3e4 + torch.randn(64, 3)
    model(ranks.share(x)).sum().backward()
    optimizer.step()
    assert_close(optimizer.state[model.weight]["vx"], x.double().var(0, correction=0).float(), rtol=1e-4, atol=0)
    return True


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
    return True


def hybrid_sharding():
    """Sharded within a group of ranks, replicated between them."""
    data = shared(3, 6)
    model = Net().double()
    twins = [copy.deepcopy(model) for _ in range(2)]
    steps(DistributedDataParallel(model), evenstep.UnitStep(model, exclude=["up.*"]), data)
    for twin, shape in zip(twins, ((1, 2), (2, 1)), strict=True):
        fully_sharded(twin, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
        steps(twin, evenstep.UnitStep(twin), data)
        assert_close(whole_weights(twin), list(model.parameters()), **CLOSE)
    return True


def sharded_after_the_optimizer_was_built():
    """As Accelerate does: parameters are replaced in the groups."""
    data = shared(3, 6)
    weights = []
    for late in (False, True):
        torch.manual_seed(0)
        model = Net().double()
        names = [name for name, _ in model.named_parameters()]
        if late:
            optimizer = evenstep.UnitStep(model)
        fully_sharded(model)
        if late:
            optimizer.param_groups[0]["params"] = [model.get_parameter(name) for name in names]
        else:
            optimizer = evenstep.UnitStep(model)
        steps(model, optimizer, data)
        weights.append(whole_weights(model))
    assert_close(*weights)
    return True


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


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every rank says of a job with a case; all jobs of a kind are run when one is asked for."""

    @cache
    def run(jobs):
        return ranks.run(tmp_path_factory.mktemp(jobs[0]), 2, joined(jobs, OPTIMIZERS))

    def of(jobs, job, case):
        k = list(OPTIMIZERS.values()).index(case) * len(jobs) + jobs.index(job)
        return [rank[k] for rank in run(jobs)]

    return of


def test_two_processes(tmp_path):
    """All in one job, since starting processes takes longer than what they do."""
    jobs = [*joined(DDP_JOBS, QUICK), *((job, ()) for job in ONCE)]
    results = ranks.run(tmp_path, 2, jobs)
    wrong = {
        job.__name__: found
        for (job, _), *both in zip(jobs, *results, strict=True)
        for found in both
        if found is not True
    }
    assert not wrong, "\n".join(f"{job}: {found}" for job, found in wrong.items())


@pytest.mark.slow
@pytest.mark.feature("DDP")
@pytest.mark.parametrize("job", DDP_JOBS)
@every_optimizer
def test_every_optimizer_on_replicas(case, job, found):
    assert found(DDP_JOBS, job, case) == [True, True]


@pytest.mark.slow
@pytest.mark.feature("FSDP2")
@pytest.mark.parametrize("job", FSDP_JOBS)
@every_optimizer
def test_every_optimizer_on_shards(case, job, found):
    assert found(FSDP_JOBS, job, case) == [True, True]


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
    expected, found = reshaped["trained", 2][k], reshaped["resumed", world][k]
    assert not isinstance(expected, str), expected
    assert not isinstance(found, str), found
    for p, q in zip(expected, found, strict=True):
        assert torch.equal(p, q) if world == 2 else torch.allclose(p, q, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("group", [True, 3, "world"])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(ValueError, match=r"process_group must be None \(the world group\), False .*; got"):
        evenstep.UnitStep(nn.Linear(2, 2), process_group=group)
