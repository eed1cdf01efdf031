"""A user's own file: what sweep, train, tune, init and doctor do with it, and one line for whatever is wrong in it."""

import json
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import evenstep
from evenstep.lab import diagnosis, lr_search, method_names, records, report, trial, usage, user_task
from evenstep.lab.commands import run_init, shared
from evenstep.lab.trial import Trial
from helpers import same, stopped_after_a_checkpoint
from lab_helpers import call, printed, refused, without_seconds

GOOD = """
import torch
from torch import nn
X, SIZE = torch.randn(45, 4), 10
Y = X.sum(1)

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

def batches(train):
    half = slice(0, 30) if train else slice(30, 45)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[half], Y[half]), SIZE, shuffle=train)
"""
LOSS = "\ndef loss(model, batch):\n    "
BATCHES = GOOD.partition("half =")[0]
MODEL, REST = GOOD.partition("def batches")[0], "\n\ndef batches" + GOOD.partition("def batches")[2]
NO_MODEL = MODEL.partition("return")[0]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Write my.py, and work in its folder."""
    monkeypatch.chdir(tmp_path)

    def write(text=GOOD):
        (tmp_path / "my.py").write_text(text)
        return tmp_path / "my.py"

    return write


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (GOOD, "sweep mine.py", "mine.py is not there"),
        (GOOD, "sweep records.jsonl", "records.jsonl is not a Python file; give a file such as my.py"),
        (GOOD, "sweep --methods AdamW my.py", "give your file before the options: evenstep sweep my.py"),
        (GOOD, "tune", "tune needs FILE.py"),
        (MODEL, "tune my.py", "my.py has no function 'batches'; it has: model; evenstep init writes a file"),
        (REST, "sweep my.py", "has no function 'model'; it has: batches"),
        (MODEL + REST.replace("batches", "batch"), "train my.py", "no function 'batches'; did you mean 'batch'?"),
        (GOOD.replace("batches(train)", "batches()"), "train my.py", "my.py: batches() should be batches(train)"),
        (GOOD + "def loss(batch): ...", "train my.py", "my.py: loss(batch) should be loss(model, batch)"),
        (GOOD + "import nowhere", "tune my.py", "my.py:13: ModuleNotFoundError: No module named 'nowhere'"),
        (GOOD + "def (", "tune my.py", "my.py:13: SyntaxError: invalid syntax"),
        (NO_MODEL + "1 / 0" + REST, "sweep my.py", "my.py:8: ZeroDivisionError: division by zero"),
        (NO_MODEL + "return [nn.Linear(4, 1)]" + REST, "tune my.py", "model() returned list; it should return"),
        (NO_MODEL + "return nn.ReLU()" + REST, "tune my.py", "returned a model without parameters to train"),
        (NO_MODEL + "return nn.LazyLinear(1)" + REST, "tune my.py", "weight has no shape yet; call the model"),
        (BATCHES + "return 3", "train my.py", "batches(True) returned int; it should return a DataLoader"),
        (BATCHES + "return X", "train my.py", "batches(True) returned Tensor; it should return a DataLoader"),
        (BATCHES + "return []", "tune my.py", "batches(True) gave no batch; is the data set empty"),
        (BATCHES + "return [(X, Y)] if train else []", "sweep my.py", "batches(False) gave no batch; is the"),
        (BATCHES + "raise OSError('no disk')", "sweep my.py", "my.py:11: OSError: no disk"),
        (BATCHES + "return [(X / 0, Y)]", "sweep my.py", "batch 0 of batches(True) has NaN or infinite numbers"),
        (BATCHES + "return [(X, X)]", "train my.py", "outputs [45, 1] and targets [45, 4] differ in shape; define"),
        (BATCHES + "return [X]", "train my.py", "batches are not pairs (inputs, targets); define loss(model, "),
        (BATCHES + "return [(X, Y > 0)]", "train my.py", "Target 1 is out of bounds.; define loss(model, batch) in"),
        (BATCHES + "return [(X[:, :3], Y)]", "train my.py", "mat1 and mat2 shapes cannot be multiplied"),
        (GOOD + LOSS + "return 0.5", "tune my.py", "my.py: loss() returned float; it should return a tensor of one"),
        (GOOD + LOSS + "return model(batch[0])", "tune my.py", "loss() returned a tensor of shape [10, 1]"),
        (GOOD + LOSS + "return model(batch[0]).mean().detach()", "tune my.py", "my.py: the loss has no gradient; was"),
        (GOOD + LOSS + "return nn.Linear(4, 1)(batch[0]).mean()", "tune my.py", "does not depend on the parameters"),
        (GOOD + LOSS + "return model(batch[0]).mean() / 0", "tune my.py", "loss of the first batch is"),
        (GOOD + "def metrics(model, batch): return 3", "sweep my.py", "metrics() should return a dict of numbers"),
        (GOOD, "sweep my.py --methods EvnStep", "no method is called 'EvnStep'; did you mean 'EvenStep'?"),
        (GOOD, "tune my.py --method torch.optim.AdmW", "did you mean torch.optim.AdamW?"),
        (GOOD, "tune my.py --method nowhere.Lion", "nowhere.Lion: nowhere cannot be imported"),
        (GOOD, "tune my.py --lr -1", "--lr takes positive numbers; got '-1'"),
        (GOOD, "tune my.py --minutes nan", "--minutes takes a number above 0; got nan"),
        (GOOD, "tune my.py --runs 0", "--runs must be between 1 and 10000; got 0"),
        (GOOD, "tune my.py --minute 3", "tune does not know '--minute'; did you mean --minutes?"),
        (GOOD, "tune my.py --options momentun=1", "method EvenStep with {'momentun': 1}: EvenStep.__init__() "),
        (GOOD, "sweep my.py --data fashion2", "--data is for the package's networks; my.py has a model and"),
        (GOOD, "sweep my.py --methods batch-norm", "put batch norm into model() of my.py"),
        (GOOD, "init image", "no kind of data is called 'image'; did you mean 'images'?"),
        (GOOD, "init", "my.py is there already, and stays as it is; choose another --out"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_and_nothing_is_lost(text, words, message, mine, capsys, tmp_path):
    mine(text)
    kept = tmp_path / "runs" / "my" / "records.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"config": {"mine": 1}}\n')
    assert message in refused(capsys, *words.split())
    assert (tmp_path / "my.py").read_text() == text and kept.read_text() == '{"config": {"mine": 1}}\n'


def test_a_nan_far_into_the_data_ends_the_sweep_with_the_number_of_its_batch(mine, capsys):
    mine(GOOD.replace("Y = X.sum(1)", "X[25] = torch.nan; Y = X[:, 0]").replace("shuffle=train", "shuffle=False"))
    assert "batch 2 of batches(True) has NaN or infinite numbers (tensor 0, shape [10, 4])" in refused(
        capsys, "sweep", "my.py", "--epochs", "1"
    )


SWEEP = ("sweep", "my.py", "--methods", "EvenStep", "torch.optim.NAdam", "--stepsizes", "0.01", "0.1", "--epochs", "2")


def test_a_sweep_is_resumed_and_a_changed_file_is_refused(mine, capsys, tmp_path):
    path = mine()
    shown = printed(capsys, *SWEEP)
    assert "held-out loss" in shown and shown.splitlines()[-1] == "Report: runs/my/report.html" and "8/8" in shown
    found = [r["config"] for r in records.read(tmp_path / "runs/my/records.jsonl")]
    assert [(c["method"], c["lr"]) for c in found] == [(m, lr) for m in ("evenstep", "NAdam") for lr in (0.01, 0.1)]
    assert "4 of 4 runs are in" in printed(capsys, *SWEEP)
    page = (tmp_path / "runs/my/report.html").read_text()
    assert "evenstep sweep my.py --methods evenstep" in page and "held-out loss of the last epoch" in page
    kept = (tmp_path / "runs/my/records.jsonl").read_bytes()
    mine(GOOD + "# changed")
    told = refused(capsys, *SWEEP)
    assert "holds runs of another my.py: its text has changed since; choose another --out, or bring back" in told
    assert (tmp_path / "runs/my/records.jsonl").read_bytes() == kept
    path.write_text(GOOD)
    assert call(*SWEEP, "--study", tmp_path / "study.log", "--out", "shared") == 0
    assert len(records.read(tmp_path / "shared/records.jsonl")) == 4


def begun(path, method, seed=0):
    task = user_task.load(path)
    one = shared.fitted(Trial(method, 0.01, seed, epochs=2, decay_lr=True), task)
    return trial.start(one, task), trial.first_loss(trial.start(one, task))


YIELDS = BATCHES + "for _ in range(3):\n        x = torch.randn(5, 4)\n        yield x, x[:, 0]"


@pytest.mark.parametrize("text", [GOOD, YIELDS], ids=["loader", "generator"])
def test_all_methods_see_the_same_batches_even_side_by_side(text, mine, monkeypatch):
    path, seen = mine(text), {}
    real = user_task.UserTask.loss

    def spy(task, model, batch):
        seen.setdefault(id(model), []).append(batch[0].clone())
        return real(task, model, batch)

    monkeypatch.setattr(user_task.UserTask, "loss", spy)
    alone, first = begun(path, "adamw")
    alone.finish()
    two = [begun(path, method)[0] for method in ("adamw", "evenstep")]
    seen.clear()
    for _ in zip(*(training.run() for training in two), strict=True):
        torch.rand(3)  # as dropout would
    shown = [seen[id(training.model)] for training in two]
    assert len(shown[0]) >= 6 and all(torch.equal(a, b) for a, b in zip(*shown, strict=True))
    assert without_seconds(two[0].rows) == without_seconds(alone.rows) and first > 0


def test_a_training_is_resumed_bit_for_bit(no_report, mine, capsys, monkeypatch, tmp_path):

    mine(GOOD.replace("nn.ReLU()", "nn.Dropout(0.5)"))
    words = ("train", "my.py", "--method", "AdamW", "--epochs", "3")
    assert call(*words, "--out", "whole") == 0
    with stopped_after_a_checkpoint(monkeypatch):
        assert call(*words, "--out", "parts") == 130
    assert call(*words, "--out", "parts") == 0
    whole, parts = (torch.load(tmp_path / f"{name}/checkpoint.pt") for name in ("whole", "parts"))
    assert same(whole["model"], parts["model"]) and without_seconds(whole["rows"]) == without_seconds(parts["rows"])
    (tmp_path / "parts/records.jsonl").unlink()
    mine(GOOD)
    assert "another configuration (digest of the data, or of the text of your file: " in refused(
        capsys, *words, "--out", "parts"
    )


def test_held_out_numbers_are_means_over_examples(mine):
    task = user_task.load(
        mine(GOOD + "def metrics(model, batch): return {'largest': batch[0].max()}")
    )  # of 10 and 5 rows
    model = task.model()
    x, y = task.module.X[30:], task.module.Y[30:]
    row = task.held_out(model)
    assert row["test_loss"] == pytest.approx(functional.mse_loss(model(x)[:, 0], y).item())
    assert row["metrics"]["largest"] == pytest.approx((10 * x[:10].max() + 5 * x[10:].max()).item() / 15)
    assert row["test_accuracy"] is None and model.training


def test_the_usual_loss_follows_from_the_targets():
    x, y = torch.randn(6, 5, 3), torch.randint(3, (6, 5))
    loss, found = user_task.standard(nn.Identity(), (x, y))
    assert loss == functional.cross_entropy(x.flatten(0, 1), y.flatten())
    assert found["accuracy"] == (x.argmax(-1) == y).float().mean()
    pixels = torch.randn(2, 3, 4, 4)  # classes in dimension 1
    labels = torch.randint(3, (2, 4, 4))
    assert user_task.standard(nn.Identity(), (pixels, labels))[0] == functional.cross_entropy(pixels, labels)
    assert user_task.standard(nn.Identity(), [x, x + 2])[0] == pytest.approx(4.0)
    own = type("Own", (), {"loss": x.sum()})
    assert user_task.standard(lambda inputs: own, {"inputs": x})[0] is own.loss


@pytest.mark.parametrize("kind", run_init.KINDS)
def test_init_writes_a_file_that_trains(kind, capsys, tmp_path):
    path = tmp_path / "new.py"
    assert f"Wrote {path}: a network and {kind}" in printed(capsys, "init", kind, "--out", path)
    task = user_task.load(path)
    shared.try_out(shared.fitted(Trial("evenstep", 0.025), task), task)
    model, batch = task.model(), next(task.one_pass(True, 0))
    assert task.loss(model, batch).item() == pytest.approx(user_task.standard(model, batch)[0].item())
    assert task.steps_per_epoch() == {"images": 63, "text": 100, "tables": 50}[kind]


def test_methods_are_known_by_their_public_names():
    names = {
        name: method_names.find(name).name for name in ("EvenStep", "evenstep.UnitStep", "torch.optim.AdamW", "sg")
    }
    assert [*names.values()] == ["evenstep", "unitstep", "adamw", "sg"]
    model = nn.Linear(3, 2)
    for name, base in (("torch.optim.NAdam", torch.optim.NAdam), ("evenstep.BlockNaturalSGD", torch.optim.Optimizer)):
        assert isinstance(method_names.find(name).optimizer(model, lr=0.1), base)
    whitened = method_names.find("Whitened(torch.optim.NAdam)")
    assert whitened.name == "Whitened(NAdam)" and whitened.label == "Whitened(NAdam)"
    assert type(whitened.optimizer(model, lr=0.1)) is evenstep.Whitened
    assert method_names.default_lr(method_names.find("EvenStep")) == 0.025
    assert method_names.default_lr(method_names.find("torch.optim.NAdam")) == 2e-3
    with pytest.raises(usage.UsageError, match=r"torch\.nn has no optimizer class 'Linear'"):
        method_names.find("torch.nn.Linear")


@pytest.fixture
def no_report(monkeypatch):
    """Leave out the figures, which take most of a small search's time."""
    monkeypatch.setattr(report, "write", lambda folder: folder / "report.html")


TUNE = ("tune", "my.py", "--epochs", "3")


def test_tune_finds_an_lr_that_beats_the_first_and_says_how_sure_it_is(no_report, mine, capsys, tmp_path):
    mine()
    shown = printed(capsys, *TUNE, "--runs", "9", "--lr", "0.0005")
    last = shown.splitlines()[-1]
    near = r"(?:anything from .* to .*|no other lr .*) is within \d+%.*"
    pattern = rf"EvenStep, lr ([\d.]+): held-out loss ([\d.]+) ± [\d.]+; {near}"
    lr, loss = map(float, re.fullmatch(pattern, last).groups())
    tried = {c["config"]["lr"]: c["metrics"][-1]["test_loss"] for c in records.read(tmp_path / "runs/my/records.jsonl")}
    assert lr > 0.005 and loss < tried[0.0005]
    assert f"evenstep.EvenStep(model, lr={lr:g})" in shown and "Report: runs/my/report.html" in shown
    assert len(re.findall(r"^lr ", shown, re.M)) == 9
    assert not re.findall(r"^lr ", printed(capsys, *TUNE, "--runs", "9", "--lr", "0.0005"), re.M)  # the budget is spent
    more = printed(capsys, *TUNE, "--runs", "10", "--lr", "0.0005")
    assert len(re.findall(r"^lr ", more, re.M)) <= 1


def test_tune_is_interrupted_and_goes_on_with_the_same_search(no_report, mine, capsys, monkeypatch, tmp_path):
    mine()
    whole = printed(capsys, *TUNE, "--runs", "7", "--out", "whole")
    real, begun = lr_search.Search.train, []

    def stop(search, wanted, attempt):
        begun.append(wanted.lr)
        if len(begun) % 2 == 0:
            raise KeyboardInterrupt
        return real(search, wanted, attempt)

    with monkeypatch.context() as patch:
        patch.setattr(lr_search.Search, "train", stop)
        parts = [printed(capsys, *TUNE, "--runs", "7", "--out", "parts", code=130) for _ in range(3)]
    parts.append(printed(capsys, *TUNE, "--runs", "7", "--out", "parts"))

    def told(texts):
        return [line for text in texts for line in re.findall(r"^lr .*", text, re.M)]

    assert told(parts) == told([whole]) and parts[-1].splitlines()[-1] == whole.splitlines()[-1]


def test_tune_stops_what_diverges_and_what_falls_behind(no_report, mine, capsys):
    mine()
    shown = printed(capsys, "tune", "my.py", "--epochs", "9", "--method", "SGD", "--lr", "0.05", "--runs", "6")
    ends = dict(re.findall(r"^lr (\S+) .* seed 0 +(.*)$", shown, re.M))
    assert ends["0.05"].startswith("held-out loss") and any(
        "stopped in epoch" in e or "diverged" in e for e in ends.values()
    )
    shown = printed(
        capsys, "tune", "my.py", "--epochs", "3", "--method", "SGD", "--lr", "1e9", "--runs", "2", "--out", "o"
    )
    assert "lr 3.2e+08" in shown and shown.count("diverged") >= 2
    assert re.search(r"SGD: (every run diverged|no run came to its end)", shown.splitlines()[-1])


def test_minutes_decide_how_long_the_runs_are_and_a_search_keeps_its_length(no_report, mine, monkeypatch):
    task = user_task.load(mine())
    one = shared.fitted(Trial("evenstep", 0.025, decay_lr=True), task)
    fits = {s: lr_search.fit(one, task, "cpu", lr_search.Budget(seconds=s)) for s in (1e-3, 1e3)}
    assert fits[1e3] == (10, None) and fits[1e-3][1] == 1
    monkeypatch.setattr(lr_search, "fit", lambda *arguments: (4, 2))
    assert call("tune", "my.py", "--runs", "1") == 0
    monkeypatch.setattr(lr_search, "fit", lambda *arguments: (7, 3))
    assert call("tune", "my.py", "--runs", "2") == 0
    found = records.read(task.path.parent / "runs/my/records.jsonl")
    assert {(r["config"]["epochs"], r["config"]["steps"]) for r in found} == {(4, 2)} and len(found) == 2


def test_without_optuna_tune_says_what_to_install(mine, capsys, monkeypatch):
    mine()
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert call(*TUNE) == 1
    assert 'pip install "evenstep[lab]"' in capsys.readouterr().err


def test_the_headline_counts_only_neighbours_of_the_best():
    def series(losses):
        runs = {lr: [{"config": {}, "metrics": [{"train_loss": v}]} for v in values] for lr, values in losses.items()}
        return lr_search.summary.Series("evenstep", {}, runs)

    flat = series({0.01: [1.01], 0.02: [1.5], 0.04: [1.015], 0.08: [1.0], 0.16: [1.1]})
    assert (
        lr_search.headline(flat, "E")
        == "E, lr 0.08: held-out loss 1.000 (one seed); anything from 0.04 to 0.08 is within 2%"
    )
    noisy = series({0.1: [0.9, 1.1], 0.2: [1.1]})
    assert lr_search.headline(noisy, "E").endswith("anything from 0.1 to 0.2 is within 14%, as far as seeds differ")
    assert "every run diverged" in lr_search.headline(series({0.1: [None]}), "E")


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(30, 30))


NORMED = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
ADVICE = {
    "Like a GPT: AdamW moves the embeddings (45% of": (nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 3)),
    "Batch norm (17% of": (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)),
    "Recurrent layers (97% of": (nn.LSTM(8, 16), nn.Linear(16, 3)),
    "Fine-tuning: 94% of the parameters are frozen": (nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 4)),
    "LoRA: 0% of": (nn.ModuleDict({"lora_A": nn.Linear(4, 2), "lora_B": nn.Linear(2, 4)}),),
    "Layers of your own (Mine: 99% of": (Mine(), nn.Linear(3, 3)),
    "weight norm, spectral norm": (NORMED, nn.Linear(3, 3)),
    "Nothing here is whitened": (nn.Embedding(3, 3),),
}


@pytest.mark.parametrize("words", ADVICE)
def test_doctor_has_advice_for_kinds_of_networks(words):
    model = nn.Sequential(*ADVICE[words])
    rows = diagnosis.coverage(model, None)
    assert any(words in sentence for sentence in diagnosis.advice(model, rows)), diagnosis.advice(model, rows)
    assert sum(count for count, _ in diagnosis.shares(model, rows).values()) == sum(
        p.numel() for p in model.parameters()
    )


def test_doctor_takes_a_file_as_it_is_and_counts_parameters_not_rows(mine, capsys):
    mine()
    shown = printed(capsys, "doctor", "my.py")
    assert "81.6% whitened, orthogonal steps" in shown and "18.4% whitened, AdamW" in shown  # 40 and 9 of 49
    assert "Time of a step" in shown and json.dumps(shown).count("ratio to SGD") == 1


def test_a_noisy_machine_is_named():
    even = dict.fromkeys(diagnosis.CONTENDERS, [1.0, 1.01] * 10)
    assert not any("noisy" in line for line in diagnosis.timing(even))
    assert any(
        "The machine is noisy" in line for line in diagnosis.timing({**even, "SGD with momentum": [1.0, 2.0] * 10})
    )
