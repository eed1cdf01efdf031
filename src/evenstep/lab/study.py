"""A sweep shared by processes and machines through an Optuna study that all of them can reach.

A trial of the study is an attempt at a run. Its process reports every few seconds that it is alive; after `stale`
seconds without a report it is dead (clocks should agree to that). The first living or complete attempt owns the run.
"""

import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import records
from .reading import Record
from .sweep import OnRecord, known, side_by_side
from .trial import Trial, config
from .usage import UsageError, first_line
from .user_task import Data


def run(
    url: str,
    trials: Sequence[Trial],
    data: Data,
    out: Path,
    *,
    on_record: OnRecord = lambda record: None,
    stale: float = 60.0,
    warn: Callable[[str], None] = warnings.warn,
    **settings: Any,
) -> None:
    """Run the trials that no other process owns, and wait for the others.

    `url` is a journal file or a database. `out` and `on_record` receive the records of all processes, `warn` a line if
    there are others to wait for. `settings` are those of `sweep.side_by_side`.
    """
    members = {records.dumps(config(trial, data)): trial for trial in trials}
    board, kept, waiting = Board(url, members, stale), set(known(out, data, warn)), False

    def to_run() -> Iterator[Trial]:
        while (name := board.take()) is not None:
            if (record := known(out, data).get(name)) is None:
                yield members[name]
            else:
                board.finish(name, record)

    def gathered() -> int:
        complete = board.complete()
        for name in complete.keys() - kept:
            on_record(records.append(out, complete[name], once=True))
        kept.update(complete)
        return len(complete)

    with board.alive():
        while True:
            for record in side_by_side(to_run(), data, **settings):
                board.finish(records.dumps(record["config"]), record)
                gathered()
            if (left := len(members) - gathered()) == 0:
                return
            if not waiting:
                warn(f"Waiting: {left} runs of other processes.")
            waiting = True
            time.sleep(min(1.0, stale / 10))


class Board:
    """The owner of each run, kept in the study; runs are named by their configurations."""

    def __init__(self, url: str, members: Collection[str], stale: float) -> None:
        self.members, self.stale = members, stale
        self.running: dict[str, int] = {}  # trial id of each run of this process
        import optuna
        from optuna.storages import JournalStorage, RDBStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna, self.states = optuna, optuna.trial.TrialState
        path = Path(url.removeprefix("journal://"))
        journal = url.startswith("journal://") or "://" not in url
        if journal and path.is_file() and not b'{"op_code":'.startswith(path.read_bytes()[:11]):
            raise UsageError(f"--study {path} is not a journal of Optuna; choose a file that does not exist yet")
        for wait in (0.1, 0.3, 1.0, 0.0):  # processes that start together may all try to create a database's tables
            try:
                self.storage = JournalStorage(JournalFileBackend(str(path))) if journal else RDBStorage(url)
                self.study = optuna.create_study(storage=self.storage, study_name="evenstep", load_if_exists=True)
                break
            except Exception as error:  # drivers raise many kinds
                if not wait:
                    raise UsageError(f"--study {url} cannot be opened ({first_line(error)})") from error
                time.sleep(wait)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Report every few seconds that this process is alive; in the end give back what it has not finished."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(self.stale / 6):
                for trial_id in list(self.running.values()):
                    self._set(trial_id, alive=time.time())

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            done.set()
            for trial_id in self.running.values():
                self._set(trial_id, self.states.FAIL)

    def take(self) -> str | None:
        """A run that nobody owned and this process owns now; None if there is none."""
        owned = {t.user_attrs["member"] for t in self.study.get_trials(deepcopy=False) if self._counts(t)}
        for name in (name for name in self.members if name not in owned):
            attributes = {"member": name, "alive": time.time()}
            template = self.optuna.trial.create_trial(state=self.states.RUNNING, user_attrs=attributes)
            mine = self.storage.create_new_trial(self.study._study_id, template_trial=template)
            attempts = [t for t in self.study.get_trials(deepcopy=False) if t.user_attrs["member"] == name]
            owner = next((t._trial_id for t in attempts if self._counts(t)), None)
            for trial_id in {t._trial_id for t in attempts} - {owner}:  # the dead, or mine if another was faster
                self._set(trial_id, self.states.FAIL)
            if owner == mine:
                self.running[name] = mine
                return name
        return None

    def finish(self, name: str, record: Record) -> None:
        """Put the record into the study, unless another process has taken the run over."""
        self._set(self.running.pop(name), self.states.COMPLETE, record=record)

    def complete(self) -> dict[str, Record]:
        """The records of all finished runs."""
        complete = [t.user_attrs for t in self.study.get_trials(deepcopy=False) if t.state == self.states.COMPLETE]
        return {found["member"]: found["record"] for found in complete if found["member"] in self.members}

    def _counts(self, attempt: Any) -> bool:
        """Whether an attempt is complete or alive."""
        silent = time.time() - attempt.user_attrs["alive"]
        return attempt.state == self.states.COMPLETE or (attempt.state == self.states.RUNNING and silent <= self.stale)

    def _set(self, trial_id: int, state: Any = None, **attributes: Any) -> None:
        """Change a trial, unless it has ended."""
        with suppress(self.optuna.exceptions.UpdateFinishedTrialError):
            for name, value in attributes.items():
                self.storage.set_trial_user_attr(trial_id, name, value)
            if state is not None:
                self.storage.set_trial_state_values(trial_id, state)
