"""UnitStep in Transformers' Trainer: give it the optimizer, or its class with the model among the keywords.

GPT-2's layers are Transformers' own `Conv1D`, which evenstep knows; its embeddings and norms stay plain.

    pip install "evenstep[integrations]" && python examples/transformers_example.py
"""

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import evenstep


class Counting(Dataset):
    """Sequences that count up from a random number, modulo 16."""

    def __init__(self, count: int = 256) -> None:
        self.starts = torch.randint(0, 16, (count,))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, k: int) -> dict[str, Any]:
        tokens = (self.starts[k] + torch.arange(12)) % 16
        return {"input_ids": tokens, "labels": tokens}


def network() -> GPT2LMHeadModel:
    """Two small blocks."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 16, "n_positions": 16}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **quiet))


def arguments(folder: str, **options: Any) -> TrainingArguments:
    """A short run on the CPU without reports."""
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    run = {"per_device_train_batch_size": 32, "max_steps": 60, "warmup_steps": 5}
    return TrainingArguments(output_dir=folder, **{**quiet, **run, **options})


def main(**options: Any) -> float:
    """Train, and return the last loss: ln 16 = 2.77 is chance."""
    torch.manual_seed(0)
    model = network()
    given = {"model": model, "lr": 0.05, "plain_lr": 0.01}  # "model" becomes the first argument
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            arguments(folder, **options),
            train_dataset=Counting(),
            optimizer_cls_and_kwargs=(evenstep.UnitStep, given),
        )
        trainer.train()
    model.eval()
    batch = torch.stack([Counting(64)[k]["input_ids"] for k in range(64)])
    with torch.no_grad():
        return model(input_ids=batch, labels=batch).loss.item()


if __name__ == "__main__":
    print(main())
