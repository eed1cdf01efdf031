"""Comparisons: runs with the same data set, network, length, batch size and schedule."""

from dataclasses import dataclass, replace

from . import labels
from .identity import DIGEST
from .reading import Record
from .records import dumps
from .summary import Series, Summary, common_target, initial_loss, judged_by, series, summarize

SETTING = ("data", "model", "epochs", "batch_size", "augment", "decay_lr", "model_options", "steps", "judged_by")


@dataclass(frozen=True)
class Comparison:
    """Runs that can be compared, with their metrics; series by ascending best loss."""

    runs: list[Record]
    series: list[Series]
    styles: list[labels.Style]
    summaries: list[Summary]
    l0: float | None
    target: float | None
    digest: str | None = None  # of the data, where two data sets have the same name

    @property
    def judged_by(self) -> str:
        """The column of the loss by which the runs are judged."""
        return judged_by(self.runs[0]["config"])

    @property
    def title(self) -> str:
        """The network and its data."""
        config = self.runs[0]["config"]
        which = "" if self.digest is None else f" ({self.digest})"
        if config.get("model") == config.get("data"):  # a user's file has both
            return f"{config['data']}{which}"
        network = labels.model_label(config.get("model", "A network"))
        return f"{network} on {config.get('data', 'data of its own')}{which}"


def comparisons(runs: list[Record]) -> list[Comparison]:
    """The runs as comparisons, in order of appearance; data sets of one name are told apart by their digests.

    Runs without a digest join the others, unless these have several.
    """
    settings: dict[str, dict[str | None, list[Record]]] = {}
    for run in runs:
        same = settings.setdefault(dumps({name: run["config"].get(name) for name in SETTING}), {})
        digest = run["config"].get(DIGEST)
        same.setdefault(digest if isinstance(digest, str) else None, []).append(run)
    found = []
    for same in settings.values():
        if len(set(same) - {None}) <= 1:
            found.append(compare([run for runs in same.values() for run in runs]))
        else:
            found += [replace(compare(runs), digest=digest or "no digest") for digest, runs in same.items()]
    return found


def compare(runs: list[Record]) -> Comparison:
    """The comparison of runs that can be compared; one that was recorded twice counts once."""
    found = series(runs)
    runs = [run for s in found for run in s.all_runs]
    styles, l0 = labels.styles(found), initial_loss(runs)
    target = common_target(found, l0)
    summaries = [summarize(s, l0, target) for s in found]
    order = sorted(range(len(found)), key=lambda k: summaries[k].loss)
    return Comparison(
        runs, [found[k] for k in order], [styles[k] for k in order], [summaries[k] for k in order], l0, target
    )
