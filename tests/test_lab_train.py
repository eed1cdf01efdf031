"""Models, the training loop, records and the choice of the best run."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from evenstep.lab import reading, records
from evenstep.lab.commands import run_training, shared
from evenstep.lab.data import Text
from evenstep.lab.evaluate import evaluate
from evenstep.lab.loader import epoch_batches
from evenstep.lab.methods import METHODS
from evenstep.lab.models import MODELS, alexnet, deep_net, paper_cnn
from evenstep.lab.train import Training, linear_decay
from evenstep.lab.trial import Trial
from evenstep.lab.usage import UsageError
from lab_helpers import alone, small_arrays


def tiny_model(channels=3):
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(16 * channels, 8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.parametrize(
    ("build", "settings", "outputs"),
    [
        (paper_cnn, {"channels": 1, "width": 2}, [12, 32, 240, 168, 10]),
        (alexnet, {"width": 4, "classes": 7}, [4, 12, 24, 16, 16, 64, 64, 7]),
        (deep_net, {"batch_norm": True}, [64, 64, 128, 128, 256, 256, 512, 512, 10]),
    ],
)
def test_networks_have_the_layers_of_the_papers(build, settings, outputs):
    model = build(**{"channels": 3, **settings})
    assert [p.shape[0] for p in model.parameters() if p.dim() > 1] == outputs
    assert model(torch.zeros(2, settings.get("channels", 3), 32, 32)).shape == (2, outputs[-1])


def test_kernels_of_paper_cnn_and_he_initialization_of_deep_net():
    shapes = [tuple(p.shape) for p in paper_cnn(channels=3).parameters() if p.dim() > 1]
    assert shapes == [(6, 3, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
    last = deep_net(batch_norm=True, he=True)[-1]
    assert last.weight.std().item() == pytest.approx(math.sqrt(2 / 512), rel=0.1) and last.bias.abs().sum() == 0


@pytest.mark.parametrize("build", [paper_cnn, deep_net])
def test_batch_norm_stands_before_every_relu_and_not_at_the_end(build):
    modules = list(build(batch_norm=True))
    before = [modules[i - 1] for i, m in enumerate(modules) if isinstance(m, nn.ReLU)]
    assert all(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in before)
    assert isinstance(modules[-1], nn.Linear)
    assert sum(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in modules) == len(before)


def test_training_equals_an_explicit_loop():
    arrays = small_arrays(count=10)
    torch.manual_seed(0)
    model, twin = tiny_model(), tiny_model()
    twin.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = Training(model, sgd, arrays, epochs=2, batch_size=4, seed=5).finish()

    generator = torch.Generator().manual_seed(5)
    x = (arrays.train_x.float() - arrays.mean_std[0]) / arrays.mean_std[1]
    for row in rows:
        total = 0.0
        order = torch.randperm(10, generator=generator)
        for part in (order[:4], order[4:8], order[8:]):
            loss = functional.cross_entropy(twin(x[part]), arrays.train_y[part])
            gradients = torch.autograd.grad(loss, list(twin.parameters()))
            for p, g in zip(twin.parameters(), gradients, strict=True):
                p.data -= 0.1 * g
            total += loss.item() * len(part)
        assert row["train_loss"] == pytest.approx(total / 10, rel=1e-5)
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()])


def test_the_schedule_is_applied_at_every_step():
    model = tiny_model()
    optimizer, epochs = torch.optim.SGD(model.parameters(), lr=0.5), []
    settings = {"epochs": 2, "batch_size": 5, "seed": 0, "augment": True, "schedule": linear_decay}
    training = Training(model, optimizer, small_arrays(count=10), **settings)
    rates = [optimizer.param_groups[0]["lr"] for _ in training.run(lambda row: epochs.append(row["epoch"]))]
    assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125]) and epochs == [1, 2]


def test_divergence_ends_training_and_is_marked():
    model = tiny_model()
    sgd = torch.optim.SGD(model.parameters(), lr=1e30)
    rows = Training(model, sgd, small_arrays(), epochs=5, batch_size=2, seed=0).finish()
    assert len(rows) < 5 and [row["diverged"] for row in rows] == [False] * (len(rows) - 1) + [True]


def test_evaluation_measures_loss_accuracy_and_dead_units():
    arrays, model = small_arrays(channels=3), nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    model = model.append(nn.Linear(4 * 30 * 30, 5)).append(nn.ReLU()).append(nn.Linear(5, 10)).train()
    with torch.no_grad():
        model[0].weight[1].zero_()
        model[0].bias.copy_(torch.tensor([9.0, -1.0, 9.0, 9.0]))
        model[3].bias.copy_(torch.tensor([-1e6, -1e6, 99.0, 99.0, 99.0]))
    assert evaluate(nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), arrays)["dead_share"] == 0.0
    result = evaluate(model, arrays, batch_size=3)
    assert result["dead_share"] == pytest.approx(3 / 9)
    assert model.training and not any(m._forward_hooks for m in model.modules())
    with torch.no_grad():
        output = model(arrays.normalize(arrays.test_x))
    assert result["test_accuracy"] == pytest.approx((output.argmax(1) == arrays.test_y).float().mean().item())
    assert result["test_loss"] == pytest.approx(functional.cross_entropy(output, arrays.test_y).item(), rel=1e-5)


def test_text_comes_in_windows_and_is_evaluated_by_characters():
    text = Text(torch.arange(900) % 7, torch.arange(300) % 7, "alphabet", "abcdefg")
    x, y = next(epoch_batches(text, 3, torch.Generator().manual_seed(0)))
    assert x.shape == (3, 128) and torch.equal(y, (x + 1) % 7)
    found = evaluate(MODELS["transformer"](text.channels), text)
    assert found["test_loss"] == pytest.approx(math.log(7), abs=0.7) and 0 <= found["test_accuracy"] <= 1
    with pytest.raises(ValueError, match="no batch-norm version"):
        MODELS["transformer"](7, batch_norm=True)


def test_records_survive_the_file_with_null_for_nan(tmp_path):
    path = tmp_path / "records.jsonl"
    made = records.make({"lr": 0.1, "grid": (1, 2)}, 3, [{"train_loss": math.nan, "diverged": True}])
    records.append(path, made)
    records.append(path, made)
    assert records.read(path) == [made, made] and len(path.read_text().splitlines()) == 2
    assert made["metrics"][0]["train_loss"] is None and made["config"]["grid"] == [1, 2] and made["seed"] == 3
    assert {"torch", "device", "threads"} <= made["environment"].keys() and {"commit", "time"} <= made.keys()


def test_blank_lines_are_no_damage_and_only_a_line_feed_ends_a_record(tmp_path):
    path, made = tmp_path / "records.jsonl", {"config": {"name": "a\u2028b\x85c"}}
    path.write_bytes(b"\n" + json.dumps(made, ensure_ascii=False).encode() + b"\r\n \n")
    found = reading.Reading()
    reading.read_file(path, "it", found)
    assert records.read(path) == [made] and found.others == {"it": 1} and not found.faults
    assert records.append(path, {**made, "again": True}, once=True) == made
    path.write_text('{"config": {}}\n  ')
    assert records.mend(path) is None and records.read(path) == [{"config": {}}]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method):
    record = alone(Trial(method, METHODS[method].stepsizes[0], epochs=1, batch_size=5), small_arrays(channels=1))
    assert record["config"]["method"] == method and record["config"]["data"] == "random"
    assert len(record["metrics"]) == 1 and not record["metrics"][0]["diverged"]
    assert reading.is_run(reading.clean(json.loads(json.dumps(record, allow_nan=False))))


def trained_on(data, out, monkeypatch):
    monkeypatch.setattr(shared, "load", lambda options: data)
    return run_training.main(run_training.Options(method="sg", lr="0.1", epochs=1, batch_size=5, out=out))


def test_train_takes_no_other_data_of_the_same_name_for_its_own(tmp_path, monkeypatch):
    assert trained_on(small_arrays(), tmp_path, monkeypatch) == 0
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(UsageError, match="holds runs on other data called random"):
        trained_on(small_arrays(seed=1), tmp_path, monkeypatch)
    (tmp_path / "records.jsonl").unlink()  # as it is before the first training is finished
    with pytest.raises(
        UsageError,
        match=r"checkpoint\.pt is of another configuration \(digest of the data, or of",
    ):
        trained_on(small_arrays(seed=1), tmp_path, monkeypatch)
    assert (tmp_path / "checkpoint.pt").read_bytes() == kept
