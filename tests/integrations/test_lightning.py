"""Lightning steps as a plain loop does: automatic, manual, with accumulation, clipping, bf16, resume, two processes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")

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


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))


def loader():
    return DataLoader(TensorDataset(torch.randn(48, 4) + 1, torch.randn(48, 2)), batch_size=8)


def fit(model, data, epochs=1, path=None, **options):
    trainer = lightning.Trainer(max_epochs=epochs, **QUIET, **{"enable_checkpointing": False, **options})
    trainer.fit(model, data, ckpt_path=path)
    return trainer


def plain(case, net, data, every=1, clip=None, epochs=1):
    """The loop by hand."""
    optimizer = case.build(net)
    for _ in range(epochs):
        for k, (x, y) in enumerate(data):
            (functional.mse_loss(net(x), y) / every).backward()
            if (k + 1) % every == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return net


def assert_same(net, other):
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.feature("Lightning: automatic optimization")
def test_automatic_optimization_is_the_plain_loop(case):
    net, data = network(), loader()
    twin = copy.deepcopy(net)
    fit(Regression(case, net), data)
    assert_same(net, plain(case, twin, data))


@pytest.mark.feature("Lightning: manual optimization")
def test_manual_optimization_is_the_plain_loop(case):
    net, data = network(), loader()
    twin = copy.deepcopy(net)
    fit(Regression(case, net, manual=True), data)
    assert_same(net, plain(case, twin, data))


@pytest.mark.feature("Lightning: accumulation and clipping")
def test_accumulation_and_clipping_are_those_of_the_plain_loop(case):
    net, data = network(), loader()
    twin = copy.deepcopy(net)
    fit(Regression(case, net), data, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert_same(net, plain(case, twin, data, every=2, clip=0.1))


@pytest.mark.feature("Lightning: validation between epochs")
def test_validation_changes_no_step(case):
    net, data = network(), loader()
    twin = copy.deepcopy(net)
    trainer = lightning.Trainer(max_epochs=2, enable_checkpointing=False, **QUIET)
    trainer.fit(Regression(case, net), data, data)
    assert_same(net, plain(case, twin, data, epochs=2))


@pytest.mark.feature("Lightning: bf16-mixed")
def test_bf16_runs_and_stays_finite(case):
    net, data = network(), loader()
    before = copy.deepcopy(net)
    fit(Regression(case, net), data, precision="bf16-mixed")
    for p, q in zip(net.parameters(), before.parameters(), strict=True):
        assert p.isfinite().all() and not torch.equal(p, q)


@pytest.mark.feature("Lightning: checkpoint and resume, bit for bit")
def test_a_resumed_run_ends_where_the_whole_one_does(case, tmp_path):
    net, data = network(), loader()
    whole, resumed = copy.deepcopy(net), copy.deepcopy(net)
    fit(Regression(case, whole), data, epochs=3)
    half = fit(Regression(case, net), data, epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    half.save_checkpoint(tmp_path / "half.ckpt")
    nn.init.zeros_(resumed[0].weight)  # all is to come from the file
    fit(Regression(case, resumed), data, epochs=3, path=tmp_path / "half.ckpt", default_root_dir=tmp_path)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


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
