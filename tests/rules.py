"""Rules to run in whitened coordinates, torch's and others, and the slow truth about what they do there.

Gradients on v are α_i (G_ij − μ_i b_j) and b_j. The state of a rule belongs to v and stays when coordinates change.
"""

import math

import torch
from torch import nn

import oracle

SETTINGS = {"decay": 0.6, "damping": 0.1}
GUARDS = {"fresh_max": 2.0, "trust": 0.1}


class ThirdPartyRule(torch.optim.Optimizer):
    """Subclasses say what to do with a parameter."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad, group, self.state[p])


class Lion(ThirdPartyRule):
    """Sign of an interpolated momentum; ignores the parameter's value."""

    def move(self, p, grad, group, state):
        m = state.setdefault("m", torch.zeros_like(p))
        p.sub_(group["lr"] * torch.sign(0.9 * m + 0.1 * grad))
        m.mul_(0.99).add_(grad, alpha=0.01)


class CountsInGroup(ThirdPartyRule):
    """Keeps its step count in the group, as several published rules do: the steps shrink as 1/k."""

    def move(self, p, grad, group, state):
        if p is group["params"][0]:
            group["k"] = group.get("k", 0) + 1
        p.sub_(group["lr"] / group["k"] * grad)


class Lars(ThirdPartyRule):
    """A step as long as the parameter."""

    def move(self, p, grad, group, state):
        p.sub_(group["lr"] * p.norm() * grad / grad.norm())


class Shrinking(ThirdPartyRule):
    """Decays under a name of its own, and only a little."""

    def move(self, p, grad, group, state):
        p.sub_(group["lr"] * (grad + group.get("shrink", 1e-2) * p))


class WithoutRate(torch.optim.Optimizer):
    """A rule that has no stepsize to speak of."""

    def __init__(self, params):
        super().__init__(params, {})


TORCHS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    "dampening": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02}),
    "Adam": (torch.optim.Adam, {"lr": 0.02, "betas": (0.5, 0.8), "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.02}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.02, "betas": (0.5, 0.6)}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.02, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.02}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Muon": (torch.optim.Muon, {"lr": 0.05}),
}
RULES = {**TORCHS, "Lion": (Lion, {"lr": 0.01}), "CountsInGroup": (CountsInGroup, {"lr": 0.01})}


class RuleOnV(oracle.OnV):
    """A torch rule on the explicit v of every layer, recomputed from w at every step, whose steps have plain size.

    `build` makes the layer's own torch optimizer from stand-ins that start at zero at every step, or (`explicit`) that
    are v itself. `joint` shows it [weight | bias] as one matrix.
    """

    crowd = 3.0

    def __init__(self, model, build, *, joint=False, explicit=False, **keywords):
        super().__init__(model, lr=0.0, **keywords)
        self.build, self.joint, self.explicit = build, joint, explicit
        self.rules = [None] * len(self.layers)

    def frame(self, k, x, y, g2):
        c, spread, fresh = super().frame(k, x, y, g2)
        variance, means = spread - self.damping / (1 + self.damping) * spread.mean(), (c.mu**2).sum()
        power = variance.sum() + (0 if self.carries[k] else means)
        size = math.sqrt(power / (variance / spread).sum())
        bias = math.sqrt(1 + means / len(spread)) / size
        return c._replace(beta=torch.full_like(c.beta, size), bias=bias), spread, fresh

    def steps(self, k, grads, v):
        """What the rule makes of the gradient."""
        layer, parts = self.layers[k], grads
        if self.joint:
            grads, v = [as_matrix(layer, *grads)], [as_matrix(layer, *v)]
        if self.rules[k] is None:
            stand_ins = [nn.Parameter(torch.zeros_like(g)) for g in grads]
            self.rules[k] = (self.build(k, stand_ins), stand_ins)
        rule, stand_ins = self.rules[k]
        starts = v if self.explicit else [torch.zeros_like(g) for g in grads]
        for q, start, g in zip(stand_ins, starts, grads, strict=True):
            q.data.copy_(start)
            q.grad = g.clone()
        rule.step()
        steps = [q.detach() - start for q, start in zip(stand_ins, starts, strict=True)]
        return as_parts(layer, steps[0], parts) if self.joint else steps


def by_unit(layer, weight):
    """The weight with its units in the first dimension; of a transposed convolution (of one group), or back."""
    return weight.transpose(0, 1) if isinstance(layer, oracle.TRANSPOSED) else weight


def as_matrix(layer, weight, *bias):
    """[unit, inputs · kernel], and the bias as one more column."""
    return torch.cat([by_unit(layer, weight).flatten(1), *(b.unsqueeze(1) for b in bias)], dim=1)


def as_parts(layer, matrix, parts):
    """The inverse of `as_matrix`, with the shapes of these."""
    shape = by_unit(layer, parts[0]).shape
    columns = shape[1:].numel()
    return [by_unit(layer, matrix[:, :columns].reshape(shape)), *matrix[:, columns:].unbind(1)]


def without_decay(cls, keywords):
    """How `RuleOnV` builds a rule: never with weight decay, which is the optimizer's own."""
    torchs = cls.__module__.startswith("torch.")
    return lambda k, stand_ins: cls(stand_ins, **{**keywords, **({"weight_decay": 0} if torchs else {})})


def deep_network():
    """Convolutions of several kinds, linear layers with bias and without, in float64."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 2, stride=2, groups=2), nn.Softplus(),
        nn.ConvTranspose2d(6, 2, 2), nn.Flatten(), nn.Linear(18, 5, bias=False), nn.Softplus(), nn.Linear(5, 3),
    ).double()  # fmt: skip


def drifting(steps=5, shock=1.0):
    """Batches for it whose means and scales change, so that the constants move; the last is a shock."""
    sizes = [1 + 0.3 * k for k in range(steps - 1)] + [shock]
    x, t = torch.randn(steps, 5, 2, 4, 4).double(), torch.randn(steps, 5, 3).double()
    return [(size * (k / 3 + x[k]), t[k]) for k, size in enumerate(sizes)]
