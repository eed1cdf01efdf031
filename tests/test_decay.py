"""decay_groups: what decays and what does not, with every optimizer."""

import pytest
import torch
from torch import nn

import evenstep
from helpers import assert_same, descend, every_optimizer, moved_by, twins


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


BARE = ["scale", "norm.weight", "grid.weight", "grid.bias", "layer.bias", "head.bias"]
NORMED = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.InstanceNorm2d(2))


@pytest.mark.parametrize(
    ("model", "exclude", "decayed", "kept"),
    [
        (Network(), [], ["position", "embed.weight", "layer.weight"], BARE),
        (Network(), ["embed.*", "position"], ["layer.weight"], ["position", "scale", "embed.weight", *BARE[1:]]),
        (NORMED, [], ["0.weight"], ["0.bias", "1.weight", "1.bias"]),
        (nn.LayerNorm(3), [], [], ["weight", "bias"]),
        (nn.Linear(3, 2, bias=False), [], ["weight"], []),
    ],
)
def test_matrices_decay_vectors_norms_and_excluded_names_do_not(model, exclude, decayed, kept):
    """An empty group is left out."""
    groups = evenstep.decay_groups(model, 0.1, exclude=exclude)
    found = [([name for name, _ in group["params"]], group["weight_decay"]) for group in groups]
    assert found == [(names, decay) for names, decay in ((decayed, 0.1), (kept, 0.0)) if names]


@pytest.mark.parametrize(
    ("model", "keywords", "message"),
    [
        ([nn.Parameter(torch.zeros(2))], {"weight_decay": 0.1}, "model must be a module; got list"),
        (nn.Linear(2, 2), {"weight_decay": -1.0}, r"Invalid weight_decay value: -1\.0"),
        (nn.Linear(2, 2), {"weight_decay": 0.1, "exclude": "x"}, "exclude must be a list of name patterns; got"),
    ],
)
def test_bad_input_is_named(model, keywords, message):
    with pytest.raises(ValueError, match=message):
        evenstep.decay_groups(model, **keywords)


def split(case, model, decay):
    """The optimizer with a group for what decays and one for what does not."""
    keywords = case.keywords | {"weight_decay": 0.0}
    return case.cls(evenstep.decay_groups(model, decay), model=model, **keywords)


@pytest.mark.feature("decay_groups")
@every_optimizer
def test_only_what_should_decay_decays(case):
    """A gradient of zero moves nothing but by decay."""
    model = Network().double()
    optimizer, parameters = split(case, model, 0.5), dict(model.named_parameters())
    lr = case.keywords["lr"]
    plain_lr = optimizer.defaults.get("plain_lr") or lr
    moved = moved_by(optimizer, (model(torch.randint(0, 7, (5, 3))) * 0).sum())
    rates = {"position": plain_lr, "embed.weight": plain_lr, "layer.weight": lr}
    for name, p in parameters.items():
        rate = 0.5 * rates.get(name, 0.0)
        torch.testing.assert_close(moved[p], -rate / (1 - rate) * p.detach())


@every_optimizer
def test_groups_change_no_treatment_and_no_step(case):
    """Without decay, two groups step as one."""
    model, twin = twins(lambda: Network().double())
    whole, parted = case.build(model, weight_decay=0.0), split(case, twin, 0.0)
    assert sorted(whole.coverage()) == sorted(parted.coverage())
    for _ in range(3):
        x = torch.randint(0, 7, (5, 3))
        for net, optimizer in ((model, whole), (twin, parted)):
            descend(optimizer, net(x).square().mean())
    assert_same(model, twin, rtol=1e-9, atol=1e-12)
