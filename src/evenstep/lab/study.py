"""A sweep shared by processes and machines through an Optuna study that all of them can reach.

Every attempt at a member of the sweep is a trial of the study, and its process reports every few seconds that it is
alive. The lowest-numbered attempt that is alive or complete owns the member. An attempt is dead if its process is gone
from this machine, or silent for `stale` seconds (clocks should agree to within that); then another process takes over.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import processes, records, study_storage
from .data import Arrays, Text
from .summary import final_loss
from .sweep import OnRecord, key, known, side_by_side
from .trial import Trial, config

STALE = 120.0


def run(
    url: str,
    trials: Sequence[Trial],
    data: Arrays | Text,
    out: Path,
    *,
    on_record: OnRecord = lambda record: None,
    on_other: OnRecord = lambda record: None,
    on_wait: Callable[[str], None] = lambda what: None,
    stale: float = STALE,
    warn: Callable[[str], None] = warnings.warn,
    **settings: Any,
) -> list[records.Record]:
    """Run the members that no other process owns, and wait for the others: the records of all, in their order.

    `url` is a journal file (journal:///path, or a path that ends in .log or .journal) or a database (sqlite:///path,
    postgresql://…). Every process must be given the same trials. All records are added to `out`; `on_record` receives
    those of this process, `on_other` the others, `on_wait` every second what is waited for, and "" after the wait.
    `settings` are those of `sweep.side_by_side`.
    """
    configs = [records.plain(config(trial, data)) for trial in trials]
    members = {key(one): trial for one, trial in zip(configs, trials, strict=True)}
    board, kept, waits = Board(url, list(members), stale, warn), set(known(out, data, warn)) & members.keys(), False

    def keep(name: str, record: records.Record, tell: OnRecord) -> None:
        if name not in kept:
            kept.add(name)
            tell(records.append(out, record, once=True))

    def to_run() -> Iterator[Trial]:
        while (name := board.take()) is not None:
            if waits:
                on_wait("")
            if (record := known(out, data).get(name)) is None:
                yield members[name]
            else:
                board.finish(name, record)

    with processes.terminable(), board.alive():
        while True:
            for record in side_by_side(to_run(), data, **settings):
                board.finish(key(record["config"]), record)
                keep(key(record["config"]), record, on_record)
            complete = board.complete()
            for name, record in complete.items():
                keep(name, record, on_other)
            if len(complete) == len(members):
                break
            waits = True
            on_wait(f"{len(members) - len(complete)} runs of other processes")
            time.sleep(min(1.0, stale / 10))
    have = known(out, data)
    return [have[key(one)] for one in configs]


class Board:
    """The owner of each member, kept in the study; members have names."""

    def __init__(self, url: str, members: list[str], stale: float, warn: Callable[[str], None]) -> None:
        self.members, self.stale = members, stale
        self.mine: dict[str, int] = {}  # trial id of each member that this process is running
        self.optuna, self.storage, self.study_id = study_storage.joined(url, members, warn)
        self.states = self.optuna.trial.TrialState

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Report every few seconds that this process is alive; in the end give back what it has not finished."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(self.stale / 6):
                for trial_id in list(self.mine.values()):
                    self._set(trial_id, alive=time.time())

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            for trial_id in self.mine.values():
                self._set(trial_id, self.states.FAIL)

    def take(self) -> str | None:
        """A member that nobody owned and this process owns now; None if there is none."""
        owned = {t.user_attrs["member"] for t in self._attempts() if self._counts(t)}
        for name in (name for name in self.members if name not in owned):
            process = [processes.host(), os.getpid()]
            attributes = {"member": name, "alive": time.time(), "process": process}
            template = self.optuna.trial.create_trial(state=self.states.RUNNING, user_attrs=attributes)
            mine = self.storage.create_new_trial(self.study_id, template_trial=template)
            attempts = [t for t in self._attempts() if t.user_attrs["member"] == name]
            owner = next((t._trial_id for t in attempts if self._counts(t)), None)
            if owner != mine:  # another process was faster
                self._set(mine, self.states.FAIL)
                continue
            for attempt in attempts:
                if attempt._trial_id != mine:  # a dead one
                    self._set(attempt._trial_id, self.states.FAIL)
            self.mine[name] = mine
            return name
        return None

    def finish(self, name: str, record: records.Record) -> None:
        """Put the record into the study, unless another process has taken the member over."""
        self._set(self.mine.pop(name), self.states.COMPLETE, [final_loss(record)], record=record)

    def complete(self) -> dict[str, records.Record]:
        """The records of all finished members."""
        complete = [t.user_attrs for t in self._attempts() if t.state == self.states.COMPLETE]
        return {attributes["member"]: attributes["record"] for attributes in complete}

    def _attempts(self) -> list[Any]:
        return self.storage.get_all_trials(self.study_id, deepcopy=False)

    def _counts(self, attempt: Any) -> bool:
        """Whether an attempt is complete or alive."""
        if attempt.state != self.states.RUNNING:
            return attempt.state == self.states.COMPLETE
        silent = time.time() - attempt.user_attrs["alive"]
        return silent <= self.stale and not processes.is_gone(*attempt.user_attrs["process"])

    def _set(self, trial_id: int, state: Any = None, values: list[float] | None = None, **attributes: Any) -> None:
        """Change a trial, unless it has ended."""
        with suppress(self.optuna.exceptions.UpdateFinishedTrialError):
            for name, value in attributes.items():
                self.storage.set_trial_user_attr(trial_id, name, value)
            if state is not None:
                self.storage.set_trial_state_values(trial_id, state, values)
