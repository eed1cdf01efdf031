"""LoRA adapters by peft are Linear layers: they are whitened, and what they adapt stays."""

import pytest
import torch

from helpers import descend, is_finite, still, weights

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def adapted():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=2, **sizes)
    model = transformers.BertForSequenceClassification(config)
    lora = {"r": 2, "target_modules": ["query", "value"], "init_lora_weights": False}  # not zero: both halves train
    return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", **lora))


@pytest.mark.feature("LoRA adapters by peft")
def test_adapters_are_whitened_train_and_leave_the_rest_alone(case):
    model = adapted()
    optimizer = case.build(model)
    rows = {row.parameter: row.treatment for row in optimizer.coverage()}
    adapters = [name for name in rows if "lora_" in name]
    assert len(adapters) == 4
    assert {rows[name] for name in adapters} == {case.cls.coordinates.name}
    before = weights(model)
    for _ in range(2):
        descend(optimizer, model(input_ids=torch.randint(0, 20, (6, 8)), labels=torch.randint(0, 2, (6,))).loss)
    assert is_finite(model)
    assert still(model, before) == [not p.requires_grad for p in model.parameters()]
