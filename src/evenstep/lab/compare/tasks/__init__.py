"""The tasks: a file each, or one for a family, whose `TASKS` names its rows. A new file joins by being here.

`RACE` holds the twelve of the race, fixed before its first run; `TASKS` those of research, too.
"""

import importlib
import pkgutil

from .research import RESEARCH
from .task import Task

_modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
RACE: dict[str, Task] = {name: task for module in _modules for name, task in getattr(module, "TASKS", {}).items()}
TASKS: dict[str, Task] = {**RACE, **RESEARCH}
