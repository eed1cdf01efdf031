"""Runs that can be compared: of one data set, network, length and batch size."""

from dataclasses import dataclass, replace

from . import labels
from .identity import DIGEST
from .records import Record, dumps
from .summary import Series, Summary, common_target, initial_loss, series, summarize

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
    digest: str | None = None  # of the data, where others have the same name

    @property
    def title(self) -> str:
        """What was trained on what."""
        config = self.runs[0]["config"]
        which = "" if self.digest is None else f" ({self.digest})"
        network = labels.model_label(config.get("model", "A network"))
        return f"{network} on {config.get('data', 'data of its own')}{which}"


def comparisons(runs: list[Record]) -> list[Comparison]:
    """The runs as comparisons, in order of appearance; data of one name are told apart where their digests differ."""
    found: dict[str, dict[str | None, list[Record]]] = {}
    for run in runs:
        same = found.setdefault(dumps({name: run["config"].get(name) for name in SETTING}), {})
        digest = run["config"].get(DIGEST)
        same.setdefault(digest if isinstance(digest, str) else None, []).append(run)
    return [one for same in found.values() for one in _of_each_data(same)]


def _of_each_data(runs: dict[str | None, list[Record]]) -> list[Comparison]:
    """Runs by the digest of their data: a comparison for each; those without one join the others, if these have one."""
    if len(set(runs) - {None}) <= 1:
        return [compare([run for same in runs.values() for run in same])]
    return [replace(compare(same), digest=digest or "no digest") for digest, same in runs.items()]


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
