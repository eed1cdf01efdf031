"""The paper's experiments, each a file with the same few names.

- `run(options, out, device, progress)` adds to the file of records `out` what it lacks, and returns the records;
- `CLAIMS` are what the paper claims, each with its section and its judge; `CLAIM` and `verdict(records)` are all of
  them in one;
- `SETTING` says how it was run, `table(records)` gives the numbers, `plot(records)` the figure.
"""

from types import ModuleType

from . import coupling, fig1, fig2, fig3, l2, scale, shock
from .common import Claim, Options, Progress, Verdict

__all__ = ["EXPERIMENTS", "Claim", "Options", "Progress", "Verdict"]

EXPERIMENTS: dict[str, ModuleType] = {
    "fig1": fig1,
    "fig2": fig2,
    "l2": l2,
    "scale": scale,
    "fig3": fig3,
    "coupling": coupling,
    "shock": shock,
}
