"""decay_groups: what decays and what does not, with every optimizer."""

import pytest
import torch
from torch import nn

import evenstep
from cases import OPTIMIZERS

every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


class Network(nn.Module):
    """Tied weights, norms of one and two dimensions, a bare vector."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.position = nn.Parameter(torch.randn(3, 4))
        self.norm, self.grid = nn.RMSNorm(4), nn.LayerNorm([3, 4])
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.grid(self.norm(self.embed(x)) + self.position)
        return self.head(torch.tanh(self.layer(x)) * self.scale)


def names(groups):
    return [[name for name, _ in group["params"]] for group in groups]


def test_matrices_decay_vectors_and_norms_do_not():
    groups = evenstep.decay_groups(Network(), 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert names(groups) == [
        ["position", "embed.weight", "layer.weight"],
        ["scale", "norm.weight", "grid.weight", "grid.bias", "layer.bias", "head.bias"],
    ]


def test_excluded_names_do_not_decay():
    decayed, kept = names(evenstep.decay_groups(Network(), 0.1, exclude=["embed.*", "position"]))
    assert decayed == ["layer.weight"]
    assert {"embed.weight", "position"} <= set(kept)


def test_batch_norm_and_convolutions():
    groups = evenstep.decay_groups(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.InstanceNorm2d(2)), 0.1)
    assert names(groups) == [["0.weight"], ["0.bias", "1.weight", "1.bias"]]


def test_an_empty_group_is_left_out():
    assert len(evenstep.decay_groups(nn.LayerNorm(3), 0.1)) == 1
    assert len(evenstep.decay_groups(nn.Linear(3, 2, bias=False), 0.1)) == 1


@pytest.mark.parametrize(
    ("model", "keywords", "message"),
    [
        ([nn.Parameter(torch.zeros(2))], {"weight_decay": 0.1}, "model must be a module; got list"),
        (nn.Linear(2, 2), {"weight_decay": -1.0}, r"Invalid weight_decay value: -1\.0"),
        (nn.Linear(2, 2), {"weight_decay": 0.1, "exclude": "x"}, "exclude must be a list of name patterns; got the"),
    ],
)
def test_bad_input_is_named(model, keywords, message):
    with pytest.raises(ValueError, match=message):
        evenstep.decay_groups(model, **keywords)


@pytest.mark.feature("decay_groups")
@every_optimizer
def test_only_what_should_decay_decays(case):
    """A gradient of zero moves nothing but by decay."""
    model = Network().double()
    rest = {k: v for k, v in case.keywords.items() if k != "weight_decay"}
    optimizer = case.cls(evenstep.decay_groups(model, 0.5), model=model, **rest)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (model(torch.randint(0, 7, (5, 3))) * 0).sum().backward()
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"position", "embed.weight", "layer.weight"}
    for name in moved:
        ratio = dict(model.named_parameters())[name] / before[name]
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio))
        assert 0.9 < ratio.mean() < 1


@every_optimizer
def test_groups_change_no_treatment_and_no_step(case):
    """Without decay, two groups step as one."""
    model, twin = Network().double(), Network().double()
    twin.load_state_dict(model.state_dict())
    rest = {k: v for k, v in case.keywords.items() if k != "weight_decay"}
    whole, split = case.cls(model, **rest), case.cls(evenstep.decay_groups(twin, 0.0), model=twin, **rest)
    assert sorted(whole.coverage()) == sorted(split.coverage())
    for _ in range(3):
        x = torch.randint(0, 7, (5, 3))
        for net, optimizer in ((model, whole), (twin, split)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
