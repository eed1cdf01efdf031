"""Transformers' Trainer, in the ways it takes an optimizer, on a GPT-2 whose layers are its own Conv1D."""

import copy

import pytest
import torch

import evenstep
from helpers import assert_all_moved, assert_same, descend, is_finite, still, twins, weights

transformers = pytest.importorskip("transformers")


def run(example, model, folder, resume=None, **keywords):
    options = keywords.pop("options", {})
    torch.manual_seed(0)
    data = example.Counting(64)
    made = transformers.Trainer(
        model,
        example.arguments(str(folder), **{"max_steps": 6, "per_device_train_batch_size": 16, "seed": 1, **options}),
        train_dataset=data,
        **keywords,
    )
    made.train(resume_from_checkpoint=resume)
    return made


@pytest.mark.feature("Transformers: Trainer(optimizers=…)")
def test_an_optimizer_that_is_passed(case, example, tmp_path):
    model = example.network()
    optimizer = case.build(model)
    before = weights(model)
    run(example, model, tmp_path, optimizers=(optimizer, None))
    assert_all_moved(model, before)


@pytest.mark.feature("Transformers: Trainer(optimizer_cls_and_kwargs=…)")
def test_a_class_with_the_model_among_its_keywords_equals_the_optimizer_passed(case, example, tmp_path):
    model, twin = twins(example.network)
    run(example, model, tmp_path, optimizers=(case.build(model), None))
    run(example, twin, tmp_path, optimizer_cls_and_kwargs=(case.cls, {"model": twin, **case.keywords}))
    assert_same(model, twin)


@pytest.mark.feature("Transformers: checkpoint and resume, bit for bit")
def test_a_resumed_run_ends_where_the_whole_one_does(case, example, tmp_path):
    model = example.network()
    whole, resumed = copy.deepcopy(model), copy.deepcopy(model)
    saving = {"save_strategy": "steps", "save_steps": 3}
    run(example, whole, tmp_path / "whole", optimizers=(case.build(whole), None), options=saving)
    path = tmp_path / "whole" / "checkpoint-3"
    run(example, resumed, tmp_path / "half", path, optimizers=(case.build(resumed), None), options=saving)
    assert_same(whole, resumed)


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
    assert {row.treatment for row in layers.values()} == {case.cls.coordinates.name}
    assert rows["transformer.wte.weight"].reason.endswith("shared by Embedding 'transformer.wte', Linear 'lm_head'")
    assert {row.treatment for name, row in rows.items() if name not in layers} == {"plain"}


def test_the_example_learns(example):
    assert example.main() < 2.0


# mixtures of experts: versions from 5 on stack the weights of all experts


SIZES = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "num_experts_per_tok": 2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXTURES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8},
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
}


@pytest.fixture(params=MIXTURES)
def mixture(request):
    """A small language model with experts."""
    name = request.param
    config = getattr(transformers, f"{name}Config")(**SIZES, **MIXTURES[name])
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.feature("Transformers' fused experts, the real ones")
def test_every_expert_is_covered_and_trains(case, mixture):
    optimizer = case.build(mixture)
    rows = {row.parameter: row.treatment for row in optimizer.coverage() if ".experts." in row.parameter}
    own = case.cls.coordinates.name
    first = "fan-in" if own == "canonical" else own
    for name, treatment in rows.items():
        if "gate_up_proj" in name:
            assert treatment == first, name
        elif first != "plain" and "down_proj" in name and name.split(".experts.")[1].count(".") == 0:
            assert treatment == "fan-in", name
    before = weights(mixture)
    for _ in range(3):
        ids = torch.randint(0, 20, (4, 12))
        descend(optimizer, mixture(input_ids=ids, labels=ids).loss)
    assert is_finite(mixture)
    names = (name for name, _ in mixture.named_parameters())
    assert not any(name in rows and kept for name, kept in zip(names, still(mixture, before), strict=True))


def test_most_parameters_of_a_mixture_are_whitened(mixture):
    """Without the experts it was 14 to 35 %."""
    sizes = {name: p.numel() for name, p in mixture.named_parameters()}
    rows = evenstep.UnitStep(mixture).coverage()
    whitened = sum(sizes[row.parameter] for row in rows if row.treatment == "whitened")
    assert whitened > 0.6 * sum(sizes.values())
