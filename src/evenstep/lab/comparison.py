"""Runs that can be compared: of one data set, network, length and batch size."""

from dataclasses import dataclass

from evenstep.lab import labels
from evenstep.lab.records import Record, dumps
from evenstep.lab.summary import Series, Summary, common_target, initial_loss, series, summarize

SETTING = ("data", "model", "epochs", "batch_size", "augment", "decay_lr", "model_options")


@dataclass(frozen=True)
class Comparison:
    """Runs that can be compared, with what was computed from them; series by ascending best loss."""

    runs: list[Record]
    series: list[Series]
    styles: list[labels.Style]
    summaries: list[Summary]
    l0: float | None
    target: float | None

    @property
    def title(self) -> str:
        """What was trained on what."""
        config = self.runs[0]["config"]
        return f"{labels.model_label(config.get('model', 'A network'))} on {config.get('data', 'data of its own')}"


def comparisons(runs: list[Record]) -> list[Comparison]:
    """The runs as comparisons, in order of appearance."""
    found: dict[str, list[Record]] = {}
    for run in runs:
        found.setdefault(dumps({name: run["config"].get(name) for name in SETTING}), []).append(run)
    return [compare(same) for same in found.values()]


def compare(runs: list[Record]) -> Comparison:
    """What there is to say about runs that can be compared; one that was recorded twice counts once."""
    found = series(runs)
    runs = [run for s in found for run in s.all_runs]
    styles, l0 = labels.styles(found), initial_loss(runs)
    target = common_target(found, l0)
    summaries = [summarize(s, l0, target) for s in found]
    order = sorted(range(len(found)), key=lambda k: summaries[k].loss)
    return Comparison(
        runs, [found[k] for k in order], [styles[k] for k in order], [summaries[k] for k in order], l0, target
    )
