"""The picture of README.md: held-out results over lr of EvenStep, NorMuon and Muon, from records alone.

python scripts/draw_rules.py results/rules.jsonl docs/figures/rules.svg
"""

import inspect
import sys
from pathlib import Path

import evenstep
from evenstep.lab import drawing, records
from evenstep.lab.compare.job_tables import TaskRuns
from evenstep.lab.compare.scores import mean

TASKS = {
    "gpt": "byte GPT",
    "resnet-bn": "ResNet with batch norm",
    "resnet": "ResNet without",
    "deep": "nine layers without",
}
METHODS = {  # one of those named is in the records of each task
    "EvenStep": ("evenstep",),
    "NorMuon, momentum 0.9": ("normuon,momentum=0.9",),
    "Muon, momentum 0.9": ("muon,momentum=0.9", "muon-conv,momentum=0.9"),
}


def main(source: Path, target: Path) -> Path:
    """Draw one panel per task: a point is a mean over seeds, a bar their range, a ring EvenStep's default lr."""
    found = records.read(source)
    default = inspect.signature(evenstep.EvenStep).parameters["lr"].default
    figure, panels = drawing.panels(len(TASKS), width=2.7, height=2.8)
    for panel, (task, title) in zip(panels, TASKS.items(), strict=True):
        runs = TaskRuns(record for record in found if record["config"]["task"] == task)
        unit = 100 if runs.higher else 1
        for number, (label, names) in enumerate(METHODS.items()):
            points = {s.lr: [unit * v for v in runs.values[s].values()] for s in runs.values if s.method in names}
            for lr, values in points.items():
                panel.plot([lr, lr], [min(values), max(values)], color=drawing.COLOURS[number], linewidth=1.5)
            rates = sorted(points)
            panel.plot(rates, [mean(points[lr]) for lr in rates], **drawing.style(number, label))
            if label == "EvenStep" and default in points:
                panel.plot(default, mean(points[default]), "o", markersize=11, fillstyle="none", color="black")
        panel.set(xscale="log", title=f"{title}\n{'accuracy, %' if runs.higher else 'loss'}", xlabel="lr")
        drawing.plain_log(panel.xaxis)
    drawing.legend(panels[0])
    return drawing.save(figure, target, outlines=False)


if __name__ == "__main__":
    print(main(*map(Path, sys.argv[1:])))
