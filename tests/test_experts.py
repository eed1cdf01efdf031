"""Transformers' fused experts: stacked weights step like a layer for each expert."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import evenstep
import oracle
from evenstep.model.experts import ExpertsKind, two_rows
from helpers import PAPER, assert_all_moved, coverage_of, every_optimizer, moved_by, randn, weights


class Experts(nn.Module):
    """Stacked weights of 4 experts, laid out and called as Transformers does since version 5."""

    def __init__(self, hidden=3, inner=5, bias=False, transposed=False):
        super().__init__()
        self.is_transposed = transposed
        shapes = {"gate_up_proj": (4, 2 * inner, hidden), "down_proj": (4, hidden, inner)}
        for name, shape in shapes.items():
            weight = torch.randn(shape) / 2
            self.register_parameter(name, nn.Parameter(weight.mT.contiguous() if transposed else weight))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(shape[:2])))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        output = torch.zeros_like(hidden_states)
        for expert in range(4):
            token, place = torch.where(top_k_index == expert)
            gate, up = self.project("gate_up_proj", hidden_states[token], expert).chunk(2, -1)
            y = self.project("down_proj", functional.silu(gate) * up, expert) * top_k_weights[token, place, None]
            output = output.index_add(0, token, y)
        return output

    def project(self, name, x, expert):
        weight, bias = getattr(self, name)[expert], getattr(self, f"{name}_bias", None)
        return functional.linear(x, weight.T if self.is_transposed else weight, None if bias is None else bias[expert])


Experts.forward.__module__ = "transformers.models.some_moe.modeling_some_moe"


def mix(experts, x, index):
    """Send each token to two of the experts."""
    return experts(x, index, torch.full(index.shape, 0.5).to(x))


def routed(tokens=24, experts=4):
    """Tokens of experts that differ in mean and scale, and two experts for each."""
    index = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)])
    x = randn(tokens, 3) * (1 + index.sum(1, keepdim=True)) + index[:, :1]
    return x, index


STACKS = {
    "gated": {},
    "transposed": {"transposed": True},
    "transposed, biased": {"transposed": True, "bias": True},
}


@pytest.mark.parametrize("stack", STACKS)
def test_fused_experts_step_like_a_layer_for_each_expert(stack):
    """Undamped, since damping is relative to all experts. The input of their second layer is not seen."""
    model, (x, index) = Experts(**STACKS[stack]).double(), routed()
    optimizer = evenstep.WhitenedSGD(model, lr=0.02, **PAPER)
    for name, (treatment, reason) in coverage_of(optimizer).items():
        assert treatment == ("fan-in" if "down" in name else "whitened")
        assert ("its input is not seen" in reason) == ("down" in name)
    moved = moved_by(optimizer, (mix(model, x, index) - 1).square().mean())
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        if "down" in name:
            assert_close(moved[p], -0.02 * p.grad / math.sqrt(5))
    weight, bias = model.gate_up_proj, parameters.get("gate_up_proj_bias")
    for k in range(4):
        grad, step = (t[k].T if model.is_transposed else t[k] for t in (weight.grad, moved[weight]))
        biases = [] if bias is None else [bias.grad[k]]
        dw, db = oracle.natural_gradient(grad, biases, x[(index == k).any(1)])
        assert_close(step, -0.02 * dw)
        if biases:
            assert_close(moved[bias][k], -0.02 * db[0])


@pytest.mark.feature("Transformers' fused experts")
@every_optimizer
def test_fused_experts_train_with_every_optimizer(case):
    """Also those that no token chooses in a step, and in every layout."""
    for stack in STACKS.values():
        model = nn.ModuleList([nn.Linear(3, 3), Experts(**stack)]).double()
        optimizer = case.build(model)
        before = weights(model)
        for k in range(3):
            x, index = routed(experts=4 if k == 0 else 3)
            moved_by(optimizer, mix(model[1], model[0](x), index).square().mean())
        assert_all_moved(model, before)


@pytest.mark.parametrize("autocast", [True, False])
def test_moments_of_experts_are_precise_far_from_zero_and_under_autocast(autocast):
    """Those of an expert without tokens are those of all tokens."""
    model, (x, index) = Experts(), routed(experts=3)
    optimizer, x = evenstep.WhitenedSGD(model), x.float() + 1000
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = mix(model, x, index).square().mean()
    moved_by(optimizer, loss)
    mean, var = (optimizer.state[model.gate_up_proj][key].view(4, 3).double() for key in ("mx", "vx"))
    for k in range(4):
        own = (x[(index == k).any(1)] if k < 3 else x).double()
        assert_close(mean[k], own.mean(0), rtol=1e-6, atol=0)
        assert_close(var[k], own.var(0, correction=0), rtol=1e-2, atol=0)


def test_two_rows_have_the_moments_of_each_experts_tokens():
    """Expert parallelism and identity experts mark tokens of other experts by indices beyond the last."""
    x = torch.tensor([[1.0], [3.0], [8.0], [100.0]])
    assert_close(two_rows(x, torch.tensor([[0], [0], [1], [7]]), 2), torch.tensor([[3.0, 8.0], [1.0, 8.0]]))


@pytest.mark.parametrize("by_keyword", [True, False])
def test_experts_called_with_sequences_share_as_a_linear_does(by_keyword):
    model, x = Experts().double(), randn(5, 7, 3)
    index = torch.randint(4, (35, 2))
    call = {"top_k_index": index, "top_k_weights": torch.ones(35, 2), "hidden_states": x}
    args, kwargs = ((), call) if by_keyword else ((x, index), {})
    first, down = ExpertsKind().look(model, args, kwargs, x, 0)
    assert (first.examples, first.applied) == (down.examples, down.applied) == (5, 35)
    assert_close(first.x, two_rows(x, index, 4))
    assert down.x is None


def on_twice_the_input(self, hidden_states, top_k_index, top_k_weights):
    """A user's own forward, which may compute anything."""
    return Experts.forward(self, 2 * hidden_states, top_k_index, top_k_weights)


@pytest.mark.parametrize("odd", ["forward", "bias", "layout"])
def test_experts_of_unknown_kinds_are_plain(odd):
    """With a forward of their own, biases beside weights laid out as in a Linear, or no word about the layout."""
    forward = on_twice_the_input if odd == "forward" else Experts.forward
    experts = type("OddExperts", (Experts,), {"forward": forward})(bias=odd == "bias")
    if odd == "layout":
        del experts.is_transposed
    rows = coverage_of(evenstep.WhitenedSGD(nn.ModuleList([experts, nn.Linear(2, 2)])))
    assert rows["0.gate_up_proj"] == rows["0.down_proj"] == ("plain", "no whitened form for OddExperts")
