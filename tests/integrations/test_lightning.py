"""Lightning steps as a plain loop does: automatic, manual, with accumulation, clipping, bf16, resume, two processes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from helpers import assert_all_moved, assert_same, plain_loop, regression

lightning = pytest.importorskip("lightning")

CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Regression(lightning.LightningModule):
    """A small network under the optimizer of a case."""

    def __init__(self, case, net, manual=False):
        super().__init__()
        self.case, self.net, self.automatic_optimization = case, net, not manual

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = functional.mse_loss(self(x), y)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, index):
        self(100 * batch[0])

    def configure_optimizers(self):
        return self.case.build(self)


def fit(model, batches, epochs=1, path=None, validate=False, **options):
    trainer = lightning.Trainer(max_epochs=epochs, **QUIET, **{"enable_checkpointing": False, **options})
    trainer.fit(model, *[DataLoader(batches, batch_size=None)] * (1 + validate), ckpt_path=path)
    return trainer


WAYS = [
    pytest.param(manual, marks=pytest.mark.feature(f"Lightning: {name} optimization"), id=name)
    for name, manual in (("automatic", False), ("manual", True))
]


@pytest.mark.parametrize("manual", WAYS)
def test_automatic_and_manual_optimization_are_the_plain_loop(case, manual):
    net, twin, batches = regression()
    fit(Regression(case, net, manual=manual), batches)
    assert_same(plain_loop(case.build(twin), twin, batches), net, **CLOSE)


@pytest.mark.feature("Lightning: accumulation and clipping")
def test_accumulation_and_clipping_are_those_of_the_plain_loop(case):
    net, twin, batches = regression()
    fit(Regression(case, net), batches, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert_same(plain_loop(case.build(twin), twin, batches, every=2, clip=0.1), net, **CLOSE)


@pytest.mark.feature("Lightning: validation between epochs")
def test_validation_changes_no_step(case):
    net, twin, batches = regression()
    fit(Regression(case, net), batches, epochs=2, validate=True)
    assert_same(plain_loop(case.build(twin), twin, 2 * batches), net, **CLOSE)


@pytest.mark.feature("Lightning: bf16-mixed")
def test_bf16_runs_and_stays_finite(case):
    net, before, batches = regression()
    fit(Regression(case, net), batches, precision="bf16-mixed")
    assert_all_moved(net, before.parameters())


@pytest.mark.feature("Lightning: checkpoint and resume, bit for bit")
def test_a_resumed_run_ends_where_the_whole_one_does(case, tmp_path):
    net, whole, batches = regression()
    resumed = copy.deepcopy(net)
    fit(Regression(case, whole), batches, epochs=3)
    half = fit(Regression(case, net), batches, epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    half.save_checkpoint(tmp_path / "half.ckpt")
    nn.init.zeros_(resumed[0].weight)  # all is to come from the file
    fit(Regression(case, resumed), batches, epochs=3, path=tmp_path / "half.ckpt", default_root_dir=tmp_path)
    assert_same(whole, resumed)


@pytest.mark.feature("Lightning: example")
def test_the_example_learns(example):
    assert example.main() > 0.9


@pytest.mark.feature("Lightning: two processes (ddp)")
def test_two_processes_keep_the_same_weights(example, tmp_path):
    """Every rank writes its weights at the end."""
    example.main(epochs=2, strategy="ddp_spawn", devices=2, callbacks=[Ranks(tmp_path)])
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


class Ranks(lightning.Callback):
    """Writes each rank's weights."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, module):
        torch.save(module.state_dict(), self.folder / f"{trainer.global_rank}.pt")
