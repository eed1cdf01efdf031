"""The paper's experiments, a file each with the same names.

`run(session)` adds the missing records to the session's file and returns all of them. `CLAIMS` are the paper's claims,
each with its section and the function that judges it. `SETTING` says how it was run, `table(records)` gives the
numbers, `plot(records)` the figure.
"""

from types import ModuleType

from . import coupling, fig1, fig2, fig3, l2, scale, shock
from .common import Claim, Verdict
from .session import Options, Progress, Session

__all__ = ["EXPERIMENTS", "Claim", "Options", "Progress", "Session", "Verdict"]

EXPERIMENTS: dict[str, ModuleType] = {
    "fig1": fig1,
    "fig2": fig2,
    "l2": l2,
    "scale": scale,
    "fig3": fig3,
    "coupling": coupling,
    "shock": shock,
}
