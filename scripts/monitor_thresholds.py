"""What `CurvatureMonitor` reads on healthy and on sick runs: the evidence behind its thresholds and docs/guards.md.

    python scripts/monitor_thresholds.py run results/monitor-thresholds.jsonl    # minutes on one CPU core
    python scripts/monitor_thresholds.py tables results/monitor-thresholds.jsonl

Small networks on the package's own images at half resolution (paper_cnn: at full), batch 64, 300 steps, default lr
with linear decay to 0. Faults come at step 150, except lr x 30, which holds from the start.
"""

import json
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import evenstep
from evenstep.lab import models, records
from evenstep.lab.data import fashion_mnist_subset
from evenstep.lab.experiments.shock import shock
from evenstep.monitor import COLUMNS

STEPS, AT, BATCH = 300, 150, 64
PHASES = {"1-20": (0, 20), "21-50": (20, 50), "51-100": (50, 100), "101-300": (100, 300)}
OPTIMIZERS = {
    "UnitStep": lambda model, factor: evenstep.UnitStep(model, lr=0.05 * factor),
    "WhitenedSGD": lambda model, factor: evenstep.WhitenedSGD(model, lr=0.3 * factor),
    "Whitened(AdamW)": lambda model, factor: evenstep.Whitened(model, torch.optim.AdamW, lr=1e-3 * factor),
}
FAULTS = {"lr x 30": "guards", "units x 30": "scale", "units x 0.03": "scale", "dying units": "dead"}
FAULTS |= {"inputs x 100": "scale", "NaN batch": "nonfinite"}  # and the kind of event due within ten steps
conv = partial(nn.Conv2d, kernel_size=3, padding=1)


class Rows(nn.Module):
    """An image as a sequence of rows, read by a transformer or an LSTM."""

    def __init__(self, body: nn.Module, pool: object) -> None:
        super().__init__()
        self.enter, self.body, self.pool, self.head = nn.Linear(16, 32), body, pool, nn.Linear(32, 10)
        self.place = nn.Parameter(0.02 * torch.randn(16, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.body(self.enter(x.squeeze(1)) + self.place)))


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + super().forward(x))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    return Rows(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), lambda found: found.mean(1))


def resnet() -> nn.Module:
    parts = [[conv(12, 12), nn.BatchNorm2d(12), nn.ReLU(), conv(12, 12), nn.BatchNorm2d(12)] for _ in range(3)]
    stem = conv(1, 12), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*stem, *(Residual(*p) for p in parts), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(12, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))


DENSE = {"mlp": mlp, "paper_cnn": partial(models.paper_cnn, 1, classes=10)}  # two dense layers in a row
NETWORKS = {**DENSE, "transformer": transformer, "resnet": resnet}
NETWORKS["lstm"] = lambda: Rows(nn.LSTM(32, 32, batch_first=True), lambda found: found[0][:, -1])


@torch.no_grad()
def harm(model: nn.Module, fault: str) -> None:
    """Rescale a tenth of the first dense layer's units, the function unchanged; or kill three tenths of them."""
    if fault == "dying units":
        first = next(m for m in model.modules() if isinstance(m, nn.Linear))
        first.bias[: 3 * first.out_features // 10] -= 100
    else:
        shock(model, float(fault.removeprefix("units x ")), seed=0)


def train(network: str, name: str, fault: str, seed: int = 0, until: int = STEPS) -> tuple[list, list]:
    """The monitor's scalars at every step up to `until`, with the loss; and the events."""
    torch.manual_seed(seed)
    arrays, model = fashion_mnist_subset(), NETWORKS[network]()
    x = functional.avg_pool2d(arrays.normalize(arrays.train_x), 1 if network == "paper_cnn" else 2)
    optimizer = OPTIMIZERS[name](model, 30 if fault == "lr x 30" else 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    monitor, rows, told = evenstep.CurvatureMonitor(optimizer), [], []
    for step in range(1, until + 1):
        batch = torch.randint(len(x), (BATCH,))
        factor = {"inputs x 100": 100 if step >= AT else 1, "NaN batch": torch.nan if step == AT else 1}.get(fault, 1)
        if step == AT and "units" in fault:
            harm(model, fault)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(factor * x[batch]), arrays.train_y[batch])
        loss.backward()
        optimizer.step()
        schedule.step()
        rows.append({"loss": loss.item(), **monitor.scalars()})
        told += monitor.events()
    return rows, told


def run(out: Path) -> None:
    cases = [(network, name, "none", seed) for network in NETWORKS for name in OPTIMIZERS for seed in (0, 1)]
    cases += [(n, o, f, 0) for f in FAULTS for n in NETWORKS for o in OPTIMIZERS if "units" not in f or n in DENSE]
    for network, name, fault, seed in cases:
        rows, told = train(network, name, fault, seed, {"none": STEPS, "lr x 30": 60}.get(fault, AT + 30))
        metrics = {"loss": sum(row["loss"] for row in rows[-20:]) / 20, "events": [event._asdict() for event in told]}
        if fault == "none":
            metrics["held"] = [round(row["all/guarded_units"], 3) for row in rows]
            for column in COLUMNS:  # percentiles over layers and steps of a phase
                layers = [name for name in rows[0] if name.endswith(f"/{column}") and not name.startswith("all/")]
                spans = [torch.tensor([[row[k] for k in layers] for row in rows[a:b]]) for a, b in PHASES.values()]
                metrics[column] = [torch.quantile(span, torch.tensor([0.01, 0.5, 0.99])).tolist() for span in spans]
        config = {"network": network, "optimizer": name, "fault": fault, "steps": STEPS, "at": AT, "batch": BATCH}
        records.append(out, records.make(config, seed, metrics))
        print(f"{network:12}{name:16}{fault:13}{metrics['loss']:.3f}", *told, sep="\n    ", flush=True)


def tables(path: Path) -> None:
    found = [(r["config"], r["metrics"]) for r in map(json.loads, path.read_text().splitlines())]
    healthy = [(config, metrics) for config, metrics in found if config["fault"] == "none"]
    print("healthy: column, then 1st to 99th percentile over layers and steps, widest of all runs, at steps", *PHASES)
    for column in COLUMNS:
        spans = [[metrics[column][k] for _, metrics in healthy] for k in range(len(PHASES))]
        print(f"| `{column}` |", *(f"{min(s[0] for s in p):.2g} to {max(s[2] for s in p):.2g} |" for p in spans))
    print("healthy: share of units held back, mean over networks and highest of all")
    for name in OPTIMIZERS:
        held = torch.tensor([metrics["held"] for config, metrics in healthy if config["optimizer"] == name])
        print(f"| `{name}` |", *(f"{held[:, a:b].mean():.1%}, {held[:, a:b].max():.0%} |" for a, b in PHASES.values()))
    print("healthy: events of each run", [len(metrics["events"]) for _, metrics in healthy])
    for fault, kind in FAULTS.items():
        runs = [metrics["events"] for config, metrics in found if config["fault"] == fault]
        before = 0 if fault == "lr x 30" else AT - 1
        told = [[e["step"] for e in events if e["kind"] == kind and e["step"] > before] for events in runs]
        delays = [steps[0] - before for steps in told if steps]
        print(f"| {fault} | {kind} | {sum(d <= 10 for d in delays)} of {len(told)} | {min(delays)} to {max(delays)} |")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*not finite")
    torch.set_num_threads(1)
    {"run": run, "tables": tables}[sys.argv[1]](Path(sys.argv[2]))
