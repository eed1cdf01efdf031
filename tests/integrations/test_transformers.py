"""Transformers' Trainer, in the ways it takes an optimizer, on a GPT-2 whose layers are its own Conv1D."""

import copy

import pytest
import torch

import evenstep

transformers = pytest.importorskip("transformers")


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def run(example, model, folder, resume=None, trainer=None, **given):
    options = given.pop("options", {})
    torch.manual_seed(0)
    data = example.Counting(64)
    made = (trainer or transformers.Trainer)(
        model,
        example.arguments(str(folder), **{"max_steps": 6, "per_device_train_batch_size": 16, "seed": 1, **options}),
        train_dataset=data,
        **given,
    )
    made.train(resume_from_checkpoint=resume)
    return made


def keywords(case):
    """A case for the Trainer: the class, and keywords with the model among them."""
    return case.cls, dict(case.keywords)


@pytest.mark.feature("Transformers: Trainer(optimizers=…)")
def test_an_optimizer_that_is_given(case, example, tmp_path):
    model = example.network()
    optimizer = case.build(model)
    before = weights(model)
    run(example, model, tmp_path, optimizers=(optimizer, None))
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.feature("Transformers: Trainer(optimizer_cls_and_kwargs=…)")
def test_a_class_with_the_model_among_its_keywords_equals_the_optimizer_given(case, example, tmp_path):
    model = example.network()
    twin = copy.deepcopy(model)
    cls, given = keywords(case)
    run(example, model, tmp_path, optimizers=(case.build(model), None))
    run(example, twin, tmp_path, optimizer_cls_and_kwargs=(cls, {"model": twin, **given}))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_trainer_that_makes_its_own(example, tmp_path):
    class Own(transformers.Trainer):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer = evenstep.UnitStep(self.model, lr=0.05)
            return self.optimizer

    model = example.network()
    twin = copy.deepcopy(model)
    run(example, model, tmp_path, trainer=Own)
    run(example, twin, tmp_path, optimizers=(evenstep.UnitStep(twin, lr=0.05), None))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.feature("Transformers: checkpoint and resume, bit for bit")
def test_a_resumed_run_ends_where_the_whole_one_does(case, example, tmp_path):
    model = example.network()
    whole, resumed = copy.deepcopy(model), copy.deepcopy(model)
    saving = {"save_strategy": "steps", "save_steps": 3}
    run(example, whole, tmp_path / "whole", optimizers=(case.build(whole), None), options=saving)
    path = tmp_path / "whole" / "checkpoint-3"
    run(example, resumed, tmp_path / "half", path, optimizers=(case.build(resumed), None), options=saving)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_accumulation_bf16_and_activation_checkpointing(example, tmp_path):
    model = example.network()
    optimizer = evenstep.UnitStep(model, lr=0.05)
    options = {"gradient_accumulation_steps": 2, "bf16": True, "gradient_checkpointing": True}
    run(example, model, tmp_path, optimizers=(optimizer, None), options=options)
    assert all(p.isfinite().all() for p in model.parameters())
    assert optimizer.state[model.transformer.h[0].mlp.c_fc.weight]["mass"] > 0


@pytest.mark.feature("Transformers' Conv1D, the real one")
def test_every_layer_of_gpt2_is_whitened_and_the_rest_says_why(case, example):
    rows = {row.parameter: row for row in case.build(example.network()).coverage()}
    layers = {name: row for name, row in rows.items() if ".c_" in name}
    assert len(layers) == 2 * 2 * 4  # two blocks of four layers with a bias each
    expected = {"canonical": "canonical", "fan-in": "fan-in", "plain": "plain"}.get(case.cls.coordinates, "whitened")
    assert {row.treatment for row in layers.values()} == {expected}
    assert rows["transformer.wte.weight"].reason == "shared with Linear 'lm_head'"
    assert {row.treatment for name, row in rows.items() if name not in layers} == {"plain"}


def test_the_example_learns(example):
    assert example.main() < 2.0
