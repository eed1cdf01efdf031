"""EvenStep and UnitStep against slow truths on explicit v, and what is EvenStep's own: balls, heads, rounded lines."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import oracle
from cases import LAYERS
from evenstep import EvenStep, UnitStep
from evenstep.math import polar
from evenstep.math.stepsize import LONG
from helpers import UNGUARDED, Forward, assert_follows, coverage_of, descend, fit, randn
from rules import GUARDS, SETTINGS, RuleOnV, deep_network, drifting


def network():
    """Convolutions with padding, stride and groups, a layer without bias, all in float64."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 2, stride=2, groups=2), nn.Softplus(),
        nn.Flatten(), nn.Linear(24, 5, bias=False), nn.Softplus(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3),
    ).double()  # fmt: skip


class OrthogonalOnV(oracle.OnV):
    """EvenStep as its documentation has it, on the explicit v of every layer: the last one is the head."""

    crowd = 3.0

    def __init__(self, model, *, plain_lr=3e-3, **keywords):
        super().__init__(model, **keywords)
        self.plain_lr, self.constants, self.squares, self.radii, self.adam = plain_lr, {}, {}, {}, None

    def is_head(self, k):
        return k == len(self.layers) - 1

    def parts(self, k, weight):
        """The rows of each group."""
        return weight.detach().flatten(1).chunk(getattr(self.layers[k], "groups", 1))

    def shrinks(self, k):
        """What brings each group's weights and biases back into its ball; a bias counts relative to its input."""
        weights, biases = self.parts(k, self.w[k]), [None] * getattr(self.layers[k], "groups", 1)
        if self.carries[k]:
            biases = self.parts(k, self.b[k].unsqueeze(1) / math.sqrt(1 + self.constants[k].mu.square().mean()))
        norms = [
            torch.cat([w, b], 1).norm() if b is not None else w.norm() for w, b in zip(weights, biases, strict=True)
        ]
        rows = [math.sqrt(len(w)) for w in weights]
        radii = self.radii.setdefault(k, [max(*pair) for pair in zip(norms, rows, strict=True)])
        return [min(1, radius / norm) for radius, norm in zip(radii, norms, strict=True)]

    def frame(self, k, x, y, g2):
        """Steps of plain size."""
        c, spread, fresh = super().frame(k, x, y, g2)
        mu, alpha = c.mu, c.alpha
        variance = spread - self.damping / (1 + self.damping) * spread.mean()
        power = variance.sum() + (0 if self.carries[k] else mu @ mu)
        size = (power / (variance @ alpha**2)).sqrt()
        bias = math.sqrt(1 + mu @ mu / len(spread)) / size
        self.constants[k] = oracle.Constants(mu, alpha, torch.full_like(c.beta, size), bias)
        return self.constants[k], spread, fresh

    def steps(self, k, grads, v):
        if self.is_head(k):
            return self.adamw(grads)
        step = self.orthogonal(k, torch.cat([grads[0].flatten(1), *(g.unsqueeze(1) for g in grads[1:])], dim=1))
        columns = v[0][0].numel()
        return [step[:, :columns].view_as(v[0]), *step[:, columns:].unbind(1)]

    def held(self, k, *args):
        """Weights and biases are brought back into their balls first."""
        if not self.is_head(k):
            shrinks = self.shrinks(k)
            for params in (self.w, self.b):
                if params[k] is not None:
                    parts = params[k].chunk(len(shrinks))
                    params[k] = torch.cat([shrink * p for shrink, p in zip(shrinks, parts, strict=True)])
        return super().held(k, *args)

    def adamw(self, grads):
        if self.adam is None:
            self.stand_ins = [nn.Parameter(torch.zeros_like(g)) for g in grads]
            self.adam = torch.optim.AdamW(self.stand_ins, self.plain_lr, betas=(0.9, 0.95), weight_decay=0)
        for q, g in zip(self.stand_ins, grads, strict=True):
            q.data.zero_()
            q.grad = g
        self.adam.step()
        return [q.detach().clone() for q in self.stand_ins]

    def orthogonal(self, k, grad):
        """One matrix for each group: Nesterov, polar factor, even lines, a step of lr times the weights' length."""
        c, m, groups = self.constants[k], self.momentum, getattr(self.layers[k], "groups", 1)
        mean = m * (0 if self.buffers[k] is None else self.buffers[k]) + (1 - m) * grad
        self.buffers[k] = mean
        channels, kernel, steps = len(c.alpha) // groups, self.layers[k].weight[0, 0].numel(), []
        for g, matrix in enumerate(((1 - m) * grad + m * mean).chunk(groups)):
            factor = by_singular_values(matrix)
            dim = 1 if matrix.shape[0] >= matrix.shape[1] else 0
            square = 0.95 * self.squares.get((k, g), 0) + 0.05 * (factor**2).mean(dim, keepdim=True)
            self.squares[k, g] = square
            even = factor / square.clamp(min=1e-3 * square.mean()).sqrt()
            scale = (c.alpha[g * channels : (g + 1) * channels] * c.beta[0]).repeat_interleave(kernel)
            norm, shrink = self.parts(k, self.w[k])[g].norm(), self.shrinks(k)[g]
            wanted = max(shrink * norm, 0.1 * self.radii[k][g])
            steps.append(-self.lr * wanted / (even[:, : len(scale)] * scale).norm() * even)
        return torch.cat(steps)


def by_singular_values(matrix, quintics=polar.MINIMAX):
    """The iteration on each singular value by itself."""
    u, s, vh = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for a, b, c in quintics:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


with_momentum = pytest.mark.parametrize("momentum", [0.0, 0.9])
with_guards = pytest.mark.parametrize("guards", [UNGUARDED, GUARDS], ids=["bare", "guarded"])


@with_momentum
@with_guards
def test_a_step_is_its_documentation(guards, momentum):
    model = network()
    with torch.no_grad():
        model[0].weight *= 6  # longer than √units: its radius is its own norm
        model[7].bias *= 9
    settings = SETTINGS | {"lr": 0.1, "momentum": momentum, **guards}
    batches = drifting(shock=1.0 if guards is UNGUARDED else 30.0)
    smallest = assert_follows(OrthogonalOnV(model, **settings), EvenStep(model, **settings), model, batches)
    assert smallest == 1 if guards is UNGUARDED else smallest < 0.9


class UnitStepOnV(RuleOnV):
    """Nesterov momentum over the root of each unit's running mean square, damped by the layer's; β = 1."""

    def __init__(self, model, *, lr, momentum, eps, **keywords):
        super().__init__(model, None, **keywords)
        self.lr, self.momentum, self.eps = lr, momentum, eps
        self.squares = [oracle.Moments(self.decay) for _ in self.layers]
        self.buffers = [[0.0, 0.0] for _ in self.layers]

    def frame(self, k, x, y, g2):
        c, spread, fresh = oracle.OnV.frame(self, k, x, y, g2)
        return c._replace(beta=torch.ones_like(c.beta)), spread, fresh

    def steps(self, k, grads, v):
        _, unit = oracle.places(self.layers[k])

        def per_unit(weight, bias=0.0):
            return oracle.sum_per_unit(unit, weight**2, oracle.units(self.layers[k])) + bias**2

        square, m = per_unit(*grads), self.momentum
        self.squares[k].update(square.unsqueeze(0))
        average, _ = self.squares[k].mean_var()
        root = (self.eps + torch.maximum(average, square) + self.damping * average.mean()).sqrt()
        scale = (per_unit(*v).sqrt() / LONG).clamp(min=1) / root
        self.buffers[k] = [m * old + g for old, g in zip(self.buffers[k], grads, strict=False)]
        ahead = [(1 - m) * (g + m * b) for g, b in zip(grads, self.buffers[k], strict=True)]
        return [-self.lr * scale[unit] * ahead[0], *(-self.lr * scale * one for one in ahead[1:])]


@pytest.mark.parametrize("eps", [1e-12, 1e-2])
@with_momentum
@with_guards
def test_unit_step_is_its_documentation(guards, momentum, eps):
    model, batches = deep_network(), drifting(shock=1.0 if guards is UNGUARDED else 30.0)
    with torch.no_grad():
        model[2].weight[:3] *= 20  # units that are longer than usual
    settings = SETTINGS | {"lr": 0.1, "momentum": momentum, "eps": eps, **guards}
    smallest = assert_follows(UnitStepOnV(model, **settings), UnitStep(model, **settings), model, batches)
    assert smallest == 1 if guards is UNGUARDED else smallest < 0.9


@pytest.mark.parametrize("quintics", [polar.MINIMAX, [polar.MUON] * 4])
def test_the_iteration_brings_singular_values_near_one(quintics):
    """Those above a hundredth of the matrix's norm."""
    given = torch.logspace(-4, 0, 60).double()
    found = polar.polar(torch.diag(given)[None], quintics)[0].diagonal()[given > 0.01 * given.norm()]
    assert len(found) > 20 and found.min() > 0.6 and found.max() < 1.3


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5)])
def test_the_iteration_is_one_on_singular_values(shape):
    x = torch.randn(2, *shape).double()
    assert_close(polar.polar(x), torch.stack([by_singular_values(one) for one in x]))


@pytest.mark.parametrize("rows, columns", [(9, 16), (17, 33), (33, 17)])
def test_zeros_that_align_matrices_change_no_direction(rows, columns):
    x = randn(2, rows, columns)
    larger = nn.functional.pad(x, (0, -columns % 8, 0, -rows % 8))
    assert_close(polar.polar(larger)[:, :rows, :columns], polar.polar(x))


@pytest.mark.parametrize("scale", [1, 0])
@pytest.mark.parametrize("layer", ["conv2d", "grouped", "transposed2d", "conv2d-biasless", "linear-sequence"])
def test_a_step_is_lr_times_as_long_as_the_weights(layer, scale):
    """Weights that are zero move by a tenth of what rows of length 1 would. A bias is not counted."""
    case = LAYERS[layer]
    hidden = case.layer()
    hidden.weight.data.mul_(scale)
    groups = getattr(hidden, "groups", 1)
    model = nn.ModuleList([hidden])
    optimizer, before = EvenStep(model, lr=0.01, head=None, **UNGUARDED), matrix_of(hidden).clone()
    descend(optimizer, oracle.log_cosh(hidden(case.inputs()), 0.5).sum())
    moved = (matrix_of(hidden) - before).chunk(groups)
    for old, step in zip(before.chunk(groups), moved, strict=True):
        length = max(old.norm().item(), 0.1 * math.sqrt(len(old)))
        if hidden.bias is None:  # the step is shorter along the mean, one direction of many
            assert 0.2 < step.norm().item() / (0.01 * length) < 1
        else:
            assert step.norm().item() == pytest.approx(0.01 * length, rel=1e-9)


def matrix_of(layer):
    """The weight as [unit, inputs · kernel], copied."""
    weight = layer.weight.detach()
    return (weight.transpose(0, 1) if isinstance(layer, oracle.TRANSPOSED) else weight).flatten(1)


def test_weights_stay_in_their_balls():
    """As long as training goes on, they are at most a step outside. They start inside: rows are shorter than 1."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    optimizer = EvenStep(model, lr=0.2, trust=None)
    x, t = randn(32, 6), 100 * randn(32, 3)  # a target that asks for ever longer weights
    for _ in range(60):
        fit(optimizer, model, [(x, t)])
        assert model[0].weight.norm() <= 1.2001 * math.sqrt(12)
    assert model[0].weight.norm() > 0.9 * math.sqrt(12)
    assert_close(optimizer.state[model[0].weight]["radius"], torch.tensor([math.sqrt(12)]).double())


def test_biases_share_the_balls_of_their_weights():
    """However long a constant lr lasts; a bias counts relative to the size of a constant input beside its layer's."""
    layers = [m for size in ((8, 24), (24, 24), (24, 24)) for m in (nn.Linear(*size), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(24, 4)).double()
    optimizer = EvenStep(model, lr=0.05)
    for _ in range(150):
        classes = torch.randint(4, (32,))  # at random: there is nothing to learn
        descend(optimizer, nn.functional.cross_entropy(model(randn(32, 8) + 1), classes))
    for layer in layers[::2]:
        state = optimizer.state[layer.weight]
        size = (1 + state["mx"].square().mean()).sqrt()
        joint = torch.hypot(layer.weight.detach().norm(), layer.bias.detach().norm() / size)
        assert joint < 1.1 * state["radius"]
    assert layers[0].bias.norm() > 2  # it would be 8 without


def test_a_bias_before_a_norm_does_not_move_by_rounding():
    """Its gradient is zero but for rounding, which evening out lines would blow up."""
    model = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Tanh(), nn.Linear(8, 3)
    ).double()
    nn.init.zeros_(model[0].bias)
    with torch.no_grad():
        model[0].weight -= model[0].weight.mean(0)  # a shift of all outputs alike is what the norm does not see
    fit(EvenStep(model, **UNGUARDED), model, [(randn(16, 6), randn(16, 3)) for _ in range(5)])
    shift = model[0].bias.detach().mean().abs()
    assert shift < 1e-3 * model[0].bias.detach().std() + 1e-3


def named():
    """A model whose last layer by registration is not the one called last."""
    layers = {"out": nn.Linear(8, 3), "hidden": nn.Linear(6, 8)}
    return Forward(lambda self, x: self.out(torch.tanh(self.hidden(x))), **layers).double()


def uses_adam(optimizer, weight):
    return "exp_avg" in optimizer.state[weight]


def test_the_head_is_the_layer_called_last_and_kept_in_checkpoints():
    """Also for a model that is wrapped, whose layers have other names."""
    model = named()
    optimizer = EvenStep(model)
    fit(optimizer, model, [(randn(8, 6), randn(8, 3))])
    assert uses_adam(optimizer, model.out.weight) and not uses_adam(optimizer, model.hidden.weight)
    twin = nn.Sequential(copy.deepcopy(model))
    other = EvenStep(twin)
    other.load_state_dict(optimizer.state_dict())
    fit(other, twin, [(randn(8, 6), randn(8, 3))])
    assert uses_adam(other, twin[0].out.weight) and not uses_adam(other, twin[0].hidden.weight)


def test_coverage_says_what_adamw_moves_and_which_layer_is_the_head():
    def forward(self, x):
        x = self.norm(self.hidden(self.embed(x)))
        return self.out(x * self.gate(x))

    layers = {"out": nn.Linear(8, 9), "embed": nn.Embedding(9, 8), "norm": nn.LayerNorm(8)}
    model = Forward(forward, **layers, hidden=nn.Linear(8, 8), gate=nn.Linear(8, 1))
    optimizer = EvenStep(model)
    assert coverage_of(optimizer)["gate.weight"][1] == "moved by AdamW: the head, unless another layer is called last"
    descend(optimizer, model(torch.randint(9, (8, 4))).square().mean())
    rows = coverage_of(optimizer)
    assert rows["out.weight"] == rows["out.bias"] == ("whitened", "moved by AdamW: the head")
    assert rows["gate.weight"] == ("whitened", "moved by AdamW: one unit or input per group")
    assert rows["hidden.weight"] == ("whitened", "")
    for name, kind in (("embed.weight", "Embedding"), ("norm.bias", "LayerNorm")):
        assert rows[name] == ("plain", f"moved by AdamW; no whitened form for {kind}")
    moved_by_adamw = {name for name, (_, reason) in rows.items() if "AdamW" in reason}
    assert moved_by_adamw == {name for name, p in model.named_parameters() if "exp_avg" in optimizer.state[p]}


@pytest.mark.parametrize(("head", "adams"), [(None, set()), ("hidden*", {"hidden"}), ("*", {"hidden", "out"})])
def test_a_head_can_be_named(head, adams):
    model = named()
    optimizer = EvenStep(model, head=head)
    fit(optimizer, model, [(randn(8, 6), randn(8, 3))])
    assert {name for name in ("hidden", "out") if uses_adam(optimizer, getattr(model, name).weight)} == adams


def test_a_weight_shared_with_an_embedding_is_the_head():
    layers = {"embed": nn.Embedding(9, 6), "hidden": nn.Linear(6, 6), "out": nn.Linear(6, 9, bias=False)}
    layers["out"].weight = layers["embed"].weight
    model = Forward(lambda self, x: self.out(torch.tanh(self.hidden(self.embed(x)))), **layers)
    optimizer = EvenStep(model)
    assert coverage_of(optimizer)["embed.weight"][1].startswith("moved by AdamW: the head; shared by")
    descend(optimizer, model(torch.randint(9, (8, 4))).square().mean())
    assert uses_adam(optimizer, model.embed.weight) and not uses_adam(optimizer, model.hidden.weight)


def test_layers_of_one_unit_or_input_in_a_group_are_for_adamw():
    """A matrix of one row has one singular value: its polar factor forgets all but the direction."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 2), nn.Flatten(), nn.Linear(54, 3)).double()
    optimizer = EvenStep(model)
    fit(optimizer, model, [(randn(8, 4, 6, 6), randn(8, 3))])
    assert uses_adam(optimizer, model[0].weight) and not uses_adam(optimizer, model[1].weight)


@pytest.mark.parametrize("called", [True, False])
def test_a_last_layer_of_one_unit_is_the_head_before_any_forward_and_after(called):
    """So that state made before a forward, as for distributed checkpoints, has the names of that of training."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = EvenStep(model, lr=0.0)
    descend(optimizer, 0 * (model(randn(4, 6)).sum() if called else sum(p.sum() for p in model.parameters())))
    assert uses_adam(optimizer, model[2].weight) and not uses_adam(optimizer, model[0].weight)


def test_attention_is_orthogonalized_and_is_no_head():
    layers = {"out": nn.Linear(8, 3), "attention": nn.MultiheadAttention(8, 2, batch_first=True)}
    model = Forward(lambda self, x: self.out(self.attention(x, x, x, need_weights=False)[0]), **layers).double()
    optimizer = EvenStep(model)
    descend(optimizer, model(randn(4, 5, 8)).square().mean())
    assert uses_adam(optimizer, model.out.weight)
    for weight in (model.attention.in_proj_weight, model.attention.out_proj.weight):
        assert "radius" in optimizer.state[weight]


@pytest.mark.parametrize(("cls", "lines"), [(EvenStep, (28, 33)), (UnitStep, (8, 16))])
def test_they_keep_one_momentum_one_float_per_line_and_two_per_input(cls, lines):
    """Lines are the longer of rows and columns, the bias included, or units."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = cls(model)
    descend(optimizer, nn.functional.cross_entropy(model(torch.randn(4, 3, 4, 4)), torch.randint(0, 5, (4,))))
    for layer, inputs, count in ((model[0], 3, lines[0]), (model[3], 32, lines[1])):
        states = [dict(optimizer.state[p]) for p in layer.parameters()]
        buffers = [state.pop("momentum_buffer").numel() for state in states if "momentum_buffer" in state]
        assert sum(buffers) == sum(p.numel() for p in layer.parameters())
        sizes = [value.numel() for state in states for value in state.values()]
        assert sorted(size for size in sizes if size > 1) == sorted([inputs, inputs, count])
        assert sizes.count(1) <= 7
