"""Ranks share the matrices that EvenStep orthogonalizes: each has one owner, and all ranks take the owners' steps."""

import copy
import itertools
from dataclasses import dataclass
from functools import cache
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import evenstep
import ranks
from evenstep.math import polar
from evenstep.parallel import dtensor, shared_matrices
from evenstep.rules.orthogonal import OrthogonalRule
from helpers import Forward, descend, weights
from test_distributed import same_everywhere, skip_a_step, whole_weights


@dataclass(frozen=True)
class RuleInBfloat16(OrthogonalRule):
    """Multiplies in bfloat16 on every device."""

    def product_dtype(self, x):
        return torch.bfloat16


class NarrowEvenStep(evenstep.EvenStep):
    rule = RuleInBfloat16()


def network():
    """Layers of several shapes, some alike, some in groups, some in part frozen; the head is the last one."""

    def forward(self, x):
        x = self.into(torch.tanh(self.grouped(torch.tanh(self.conv(x)))).permute(0, 2, 3, 1).reshape(-1, 4))
        for name in ("one", "two", "three", "fixed", "halved"):
            x = x + torch.tanh(self.get_submodule(name)(x))
        x = self.tall(x)
        x = torch.relu(self.wide(x + torch.relu(self.bare(x))))
        return self.head((x + torch.relu(self.thin(x))).view(-1, 9, 5).mean(1))

    square = {name: nn.Linear(11, 11) for name in ("one", "two", "three", "fixed", "halved")}
    bare = {"tall": nn.Linear(11, 23, bias=False), "bare": nn.Linear(23, 23, bias=False)}
    convs = {"conv": nn.Conv2d(2, 6, 3), "grouped": nn.Conv2d(6, 4, 2, padding=1, groups=2)}
    ends = {"wide": nn.Linear(23, 5), "thin": nn.Linear(5, 5), "head": nn.Linear(5, 3)}
    model = Forward(forward, **convs, into=nn.Linear(4, 11), **square, **bare, **ends)
    model.fixed.weight.requires_grad_(False)
    model.halved.bias.requires_grad_(False)
    return model


def dense():
    """Layers without groups, with and without bias: two steps of the optimizer."""
    sizes = itertools.pairwise([12, 12, 12, 12, 9, 7, 7])
    return nn.Sequential(*(nn.Linear(a, b, bias=k % 2 == 0) for k, (a, b) in enumerate(sizes)), nn.Linear(7, 2))


SHAPES = [(12, 13), (12, 12), (12, 13), (9, 12), (7, 10), (7, 7)]  # of `dense`, biases as columns, without the head


def data(number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    x = 1 + torch.randn(number, 60, 2, 4, 4, generator=generator)
    y = torch.stack([x.prod(2).mean((2, 3)), x.square().mean((2, 3, 4)), x.mean((2, 3, 4))], -1)
    return list(zip(x.to(dtype), y.to(dtype), strict=True))


def vectors(number):
    return [(x.flatten(2)[:, 0, :12], y[..., :2]) for x, y in data(number)]


def train(model, optimizer, batches, share=ranks.share):
    """Train on this rank's share of each batch."""
    for x, y in batches:
        descend(optimizer, mse_loss(model(share(x)), share(y)))


def replicated(model):
    return DistributedDataParallel(model)


def sharded(model):
    for layer in (model.into, model.two, model.wide) if hasattr(model, "into") else ():
        fully_shard(layer)
    return fully_shard(model)


WAYS = (replicated, sharded)


def largest_distance(way, cls, number, **keywords):
    """How far any weight is from that of one process, over its length, and over the length of its steps together.

    The gradients are the same to the last bit: what rounding leaves of small singular values would grow by hundreds.
    """
    model = network()
    alone, start = copy.deepcopy(model), weights(model)
    net, optimizer, other = way(model), cls(model, **keywords), cls(alone, process_group=False, **keywords)
    for x, y in data(number):
        for each in (optimizer, other):
            each.zero_grad()
        mse_loss(net(ranks.share(x)), ranks.share(y)).backward()
        mse_loss(alone(x), y).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            if q.grad is not None:
                assert_close(dtensor.whole(p.grad), q.grad, rtol=1e-3, atol=1e-2 * q.grad.abs().max().item())
                q.grad.copy_(dtensor.whole(p.grad))
        optimizer.step()
        other.step()
    still = [torch.equal(q, old) for q, old in zip(alone.parameters(), start, strict=True)]
    assert still == [name in ("fixed.weight", "halved.bias") for name, _ in alone.named_parameters()]
    found = zip(whole_weights(model), alone.parameters(), start, strict=True)
    lengths = [[t.norm().item() for t in (p - q, q, q - old)] for p, q, old in found]
    return [max(far / of[k] for far, *of in lengths if far) for k in (0, 1)], optimizer


def equals_one_process(way):
    for keywords in ({}, {"capturable": True, "head": None}):
        far, optimizer = largest_distance(way, evenstep.EvenStep, 6, **keywords)
        assert far[0] <= 1e-5 and far[1] <= 1e-4, far
    if way is replicated:
        assert same_everywhere(nn.ParameterList(optimizer.state), optimizer)
    lines = [state["line_square"] for state in optimizer.state.values() if "line_square" in state]
    assert len(lines) > 9 and all(torch.equal(t, other) for t in lines for other in ranks.gathered(t))


def equals_one_process_in_bfloat16(way):
    (_, far), _ = largest_distance(way, NarrowEvenStep, 3)
    assert far <= 0.02, far


def orthogonalized(net, optimizer, batches):
    """The shapes of the matrices that this rank orthogonalizes on these batches."""
    found, plain = [], polar.polar

    def noted(x, *more):
        found.extend([tuple(x.shape[1:])] * len(x))
        return plain(x, *more)

    with mock.patch.object(polar, "polar", noted), mock.patch.object(dtensor, "gathered", None):
        train(net, optimizer, batches)
    return found


def each_matrix_has_one_owner(way):
    alone = network()
    optimizer = evenstep.EvenStep(alone, process_group=False)
    expected = orthogonalized(alone, optimizer, data(1))
    model = network()
    net = way(model)
    mine = orthogonalized(net, evenstep.EvenStep(model), data(1))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert sorted(itertools.chain(*everyone)) == sorted(expected) and len(expected) == 12
    costs = [sum(shared_matrices.cost(*shape) for shape in some) for some in everyone]
    assert max(costs) <= sum(costs) / len(costs) + max(shared_matrices.cost(*shape) for shape in expected)
    assert min(costs) > 0


def no_rank_holds_more_whole_matrices_than_it_owns():
    """None is made but by `own`, and those are no more than they cost."""
    model = network()
    net, held, own = sharded(model), [], shared_matrices.SharedMatrices.own

    def noted(self):
        found = own(self)
        held.append(sum(m.x.numel() for m in found))
        return found

    optimizer = evenstep.EvenStep(model)
    with (
        mock.patch.object(shared_matrices.SharedMatrices, "own", noted),
        mock.patch.object(dtensor, "whole", None),
    ):
        mine = orthogonalized(net, optimizer, data(1))
    assert held == [sum(rows * columns for rows, columns in mine)]
    everyone = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor(float(held[0])))
    assert max(everyone) <= sum(everyone) / len(everyone) + 23 * 23


def what_is_sent_is_what_is_said(way):
    """One collective in each direction, of so many bytes."""
    sent, rank, world = [], dist.get_rank(), dist.get_world_size()
    gather_name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    swap, gather = dist.all_to_all_single, getattr(dist, gather_name)

    def swapped(incoming, outgoing, sizes, own_sizes, group):
        sent.append(sum(own_sizes) - own_sizes[rank])
        return swap(incoming, outgoing, sizes, own_sizes, group=group)

    def gathered(found, mine, group):
        sent.append(mine.nbytes * (world - 1))
        return gather(found, mine, group=group)

    for cls, itemsize in ((evenstep.EvenStep, 4), (NarrowEvenStep, 2)):
        model = dense()
        net = way(model)
        optimizer = cls(model)
        for x, y in vectors(2):
            sent.clear()
            optimizer.zero_grad()
            mse_loss(net(ranks.share(x)), ranks.share(y)).backward()
            with mock.patch.object(dist, "all_to_all_single", swapped), mock.patch.object(dist, gather_name, gathered):
                optimizer.step()
        most = torch.tensor(sent if way is sharded else [0, *sent])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        said = shared_matrices.bytes_sent(SHAPES, world, itemsize, by_rows=way is sharded)
        assert most.tolist() == [said["directions"], said["steps"]], (most, said)


def a_step_that_is_not_finite_changes_nothing(way):
    for capturable in (False, True):
        model = network()
        net = way(model)
        optimizer = evenstep.EvenStep(model, capturable=capturable)
        train(net, optimizer, data(2))
        kept = [t for s in optimizer.state.values() for name, t in s.items() if name in ("line_square", "radius")]
        before = [t.clone() for t in (*whole_weights(model), *kept)]
        x, y = data(3)[2]
        optimizer.zero_grad()
        mse_loss(net(ranks.share(x) * (1 if ranks.rank() else torch.nan)), ranks.share(y)).backward()
        optimizer.step() if capturable else skip_a_step(optimizer)
        assert all(map(torch.equal, (*whole_weights(model), *kept), before)), capturable


def ranks_must_agree():
    """A rank that lacks a gradient would share other matrices than the rest; where all lack it, all go on."""
    results = []
    for process_group in (None, False):
        torch.manual_seed(5)
        model = network()
        net, optimizer = replicated(model), evenstep.EvenStep(model, process_group=process_group)
        for lacking in ("", "two", "", "one"):
            x, y = data(1)[0]
            optimizer.zero_grad()
            mse_loss(net(x), y).backward()
            for p in model.get_submodule(lacking).parameters() if lacking else ():
                p.grad = None
            optimizer.step()
        results.append(weights(model))
    for p, q in zip(*results, strict=True):
        assert (p - q).norm() <= 1e-5 * q.norm()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.get_submodule(("one", "two")[min(ranks.rank(), 1)]).weight.grad = None  # alike, so that sizes would agree
    optimizer.detach()
    optimizer = evenstep.EvenStep(model)
    with pytest.raises(RuntimeError, match="EvenStep: the ranks of process_group share the work on matrices"):
        optimizer.step()


def other_layouts_are_gathered():
    """Sharded within a group of ranks, replicated between them."""
    world = dist.get_world_size()
    for shape in ((1, world), (world, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        swap = mock.patch.object(shared_matrices, "swap", None)
        with swap:
            (far, _), _ = largest_distance(lambda model: fully_shard(model, mesh=mesh), evenstep.EvenStep, 3)  # noqa: B023
        assert far <= 1e-5, far


def split_along_units():
    """Tensor parallelism: the rows of a layer lie on several ranks, as under FSDP2."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    both = evenstep.EvenStep(model), evenstep.EvenStep(alone, process_group=False)
    for _ in range(4):
        x, y = torch.randn(8, 4).double(), torch.randn(8, 2).double()
        for net, optimizer in zip((model, alone), both, strict=True):
            descend(optimizer, mse_loss(net(x), y))
    assert_close(whole_weights(model), list(alone.parameters()))


BOTH_WAYS = [
    equals_one_process,
    equals_one_process_in_bfloat16,
    each_matrix_has_one_owner,
    what_is_sent_is_what_is_said,
    a_step_that_is_not_finite_changes_nothing,
]
JOBS = [
    *((job, (way,)) for job in BOTH_WAYS for way in WAYS),
    (no_rank_holds_more_whole_matrices_than_it_owns, ()),
    (ranks_must_agree, ()),
    (other_layouts_are_gathered, ()),
    (split_along_units, ()),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the ranks return of every job: all jobs are run when one is asked for."""
    return cache(lambda world: [*zip(*ranks.run(tmp_path_factory.mktemp("ranks"), world, JOBS), strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("k", range(len(JOBS)), ids=["-".join([f.__name__, *(w.__name__ for w in a)]) for f, a in JOBS])
def test_ranks_share_matrices(k, world, results):
    assert results(world)[k] == (None,) * world


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
def test_matrices_are_balanced_by_their_cost(world):
    batches = ((12, 6), (5, 20), (40, 1), (3, 20), (1, 37))
    cuts = shared_matrices.owners(batches, world)
    loads = [sum((at[r + 1] - at[r]) * cost for at, (_, cost) in zip(cuts, batches, strict=True)) for r in range(world)]
    assert [(at[0], at[-1]) for at in cuts] == [(0, number) for number, _ in batches]
    assert all([*at] == sorted(at) for at in cuts)
    assert sum(loads) == sum(number * cost for number, cost in batches)
    assert max(loads) <= (37 if world == 64 else 1.1 * sum(loads) / world)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 12, 64])
def test_rows_are_shared_as_torch_shares_them(rows):
    for world in (1, 2, 3, 5, 8):
        sizes = [len(chunk) for chunk in torch.arange(rows).chunk(world)]
        assert dtensor.row_counts(rows, world) == sizes + [0] * (world - len(sizes))
