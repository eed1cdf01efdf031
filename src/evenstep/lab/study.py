"""A sweep spread over processes and machines, through an Optuna study that all of them can reach.

The study's n-th trial is the sweep's n-th member: whoever creates that trial runs the member, and the storage hands out
each number once. A process tells that it is alive every few seconds; a member whose process is gone from this machine,
or has been silent for longer than `stale` seconds, is run again by another (clocks of the machines should agree to
within that). Records lie in the study, and in each process's own file.
"""

import hashlib
import os
import platform
import random
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from . import records
from .data import Arrays, Text
from .identity import without_digest
from .summary import final_loss
from .sweep import OnRecord, chunks, key, known, most_members, run_chunks
from .together import OnEpoch
from .trial import Trial, config
from .usage import UsageError, first_line

NAME = "evenstep"
STALE = 120.0
BEGIN = b'{"op_code":'  # of every line of a journal


def run(
    url: str,
    trials: Sequence[Trial],
    arrays: Arrays | Text,
    out: Path,
    *,
    device: torch.device | str = "cpu",
    on_record: OnRecord | None = None,
    on_other: OnRecord | None = None,
    on_epoch: OnEpoch | None = None,
    on_wait: Callable[[str], None] | None = None,
    members: int | None = None,
    stale: float = STALE,
    warn: Callable[[str], None] = warnings.warn,
) -> list[records.Record]:
    """Run the members that no other process has taken, and wait for the others: the records of all, in their order.

    `url` is a journal file (journal:///path, or a path that ends in .log or .journal) or a database (sqlite:///path,
    postgresql://…). Every process must be given the same trials. Records, those of others included, are added to `out`;
    `on_record` is told of those that were run here, `on_other` of those that were not. `on_wait` is told every second
    in a few words what is waited for, and "" when that is over. SIGTERM ends the process, but not before it has given
    back what it had taken.
    """
    if said := records.mend(out):
        warn(said)
    trials = list({key(config(t, arrays)): t for t in trials}.values())
    board = Board(url, [config(trial, arrays) for trial in trials], stale, warn)
    found, waiting = known(out, arrays), False
    told = {k for k, one in enumerate(board.configs) if key(one) in found}

    def gather() -> int:
        """Add the records of others to the file; how many members are finished."""
        everything = board.finished()
        for k in sorted(everything.keys() - told):
            told.add(k)
            kept = records.append(out, everything[k], once=True)
            if on_other is not None:
                on_other(kept)
        return len(everything)

    def wait(words: str) -> None:
        if on_wait is not None:
            on_wait(words)

    with terminable(), board.alive():
        while True:
            taken = board.take(most_members(device, members))
            if not taken:
                if gather() == len(trials):
                    break
                waiting = True
                wait(board.awaited())
                time.sleep(min(1.0, stale / 10))
                continue
            if waiting:
                waiting = False
                wait("")
            found = known(out, arrays)
            for k in list(taken):
                if (record := found.get(key(board.configs[k]))) is not None:
                    board.finish(k, record)
                    taken.remove(k)
            parts = chunks([trials[k] for k in taken], arrays, device, members)
            for finished in run_chunks(parts, arrays, device, on_epoch):
                for record in finished:
                    record = records.append(out, record, once=True)
                    member = board.configs.index(record["config"])
                    told.add(member)
                    board.finish(member, record)
                    if on_record is not None:
                        on_record(record)
                gather()
    found = known(out, arrays)
    return [found[key(one)] for one in board.configs if key(one) in found]


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the process as an exception does, so that it can put things in order."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Board:
    """Who has taken which member, kept in the study."""

    def __init__(
        self, url: str, configs: list[dict], stale: float = STALE, warn: Callable[[str], None] = warnings.warn
    ) -> None:
        """Join the study at `url`, or begin it; one that was begun for other configurations is refused."""
        self.configs, self.stale = [records.plain(c) for c in configs], stale
        self.held: dict[int, int] = {}  # trial id of each member that this process is running
        self.lock, self.process = threading.Lock(), {"host": this_host(), "pid": os.getpid()}
        with opening(url):
            self.optuna, self.storage = open_storage(url, warn)
            study = self.optuna.create_study(storage=self.storage, study_name=NAME, load_if_exists=True)
            mine, theirs = signature(self.configs), study.user_attrs.get(NAME)
            if theirs is None:
                study.set_user_attr(NAME, mine)
                theirs = study.user_attrs[NAME]
            self.study_id = self.storage.get_study_id_from_name(NAME)
        before = signature([without_digest(c) for c in self.configs])  # of a study that is older than digests
        if theirs not in (mine, before):
            there, here = (f"{said['members']} members: {said['what']}" for said in (theirs, mine))
            yours = "as yours, but not the same" if here == there else f"yours has {mine['members']}: {mine['what']}"
            raise UsageError(
                f"--study {url} holds another sweep ({there}; {yours}); give the same data and options, or another one"
            )

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Tell the others every few seconds that this process lives; give back what it has not finished."""
        done = threading.Event()
        thread = threading.Thread(target=self._beat, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            for trial_id in self.held.values():
                self._set_state(trial_id, "FAIL")
            self.held.clear()

    def _beat(self, done: threading.Event) -> None:
        while not done.wait(self.stale / 6):
            with self.lock:
                ids = list(self.held.values())
            for trial_id in ids:
                with suppress(self.optuna.exceptions.UpdateFinishedTrialError):
                    self.storage.set_trial_user_attr(trial_id, "alive", time.time())

    def take(self, count: int) -> list[int]:
        """Up to `count` members that nobody has taken, or whose process is silent; they are this process's now."""
        taken: list[int] = []
        while len(taken) < count:
            if self.storage.get_n_trials(self.study_id) < len(self.configs):
                trial_id = self._create({})
                member = self.storage.get_trial_number_from_id(trial_id)
                if member >= len(self.configs):  # another process was faster
                    self._set_state(trial_id, "PRUNED")
                    continue
            elif (again := self._take_again()) is not None:
                member, trial_id = again
            else:
                break
            self._describe(trial_id, self.configs[member])
            with self.lock:
                self.held[member] = trial_id
            taken.append(member)
        return taken

    def finish(self, member: int, record: records.Record) -> None:
        """Put the record into the study, unless another process has taken the member over meanwhile."""
        with self.lock:
            trial_id = self.held.pop(member)
        with suppress(self.optuna.exceptions.UpdateFinishedTrialError):
            self.storage.set_trial_user_attr(trial_id, "record", record)
            self._set_state(trial_id, "COMPLETE", final_loss(record))

    def finished(self) -> dict[int, records.Record]:
        """The records of all finished members, whoever ran them."""
        return {k: t.user_attrs["record"] for k, t in self._trials() if t.state.name == "COMPLETE"}

    def awaited(self) -> str:
        """What other processes are running, and when it would be taken over, in a few words."""
        running = [t for attempts in self._attempts().values() for t in attempts if self._is_alive(t)]
        if not running:
            return "a run that was given back is taken over"
        heard = time.time() - min(t.user_attrs["alive"] for t in running)
        processes = len({records.dumps(t.user_attrs.get("process") or {}) for t in running})
        runs = "1 run is" if len(running) == 1 else f"{len(running)} runs are"
        who = "a process" if processes == 1 else f"{processes} processes, one of them"
        left = max(0.0, self.stale - heard)
        return f"{runs} held by {who} last heard of {heard:.0f} s ago; taken over in {left:.0f} s if it stays silent"

    def _take_again(self) -> tuple[int, int] | None:
        """A member whose processes have all failed or fallen silent: the first to ask for it in the study gets it."""
        for member, attempts in self._attempts().items():
            if any(t.state.name == "COMPLETE" or self._is_alive(t) for t in attempts):
                continue
            for t in attempts:
                self._set_state(t._trial_id, "FAIL")
            attempt = len(attempts)
            trial_id = self._create({"member": member, "attempt": attempt})
            rivals = [t for k, t in self._trials() if k == member and t.user_attrs.get("attempt") == attempt]
            if min(rivals, key=lambda t: t.number)._trial_id == trial_id:
                return member, trial_id
            self._set_state(trial_id, "PRUNED")
        return None

    def _attempts(self) -> dict[int, list[Any]]:
        """The trials of each member; lost races, which are pruned, left out."""
        found: dict[int, list[Any]] = {}
        for member, trial in self._trials():
            if trial.state.name != "PRUNED":
                found.setdefault(member, []).append(trial)
        return found

    def _trials(self) -> list[tuple[int, Any]]:
        """Every trial of the study with its member."""
        trials = self.storage.get_all_trials(self.study_id, deepcopy=False)
        numbered = [(t.user_attrs.get("member", t.number), t) for t in trials]
        return [(member, t) for member, t in numbered if member < len(self.configs)]

    def _is_alive(self, trial: Any) -> bool:
        """Whether a process runs the trial: it was heard of, and is not known to be gone from this machine."""
        if trial.state.name != "RUNNING" or time.time() - trial.user_attrs["alive"] > self.stale:
            return False
        process = trial.user_attrs.get("process") or {}
        return process.get("host") != self.process["host"] or not is_gone(process["pid"])

    def _create(self, attributes: dict[str, Any]) -> int:
        running, told = self.optuna.trial.TrialState.RUNNING, {"alive": time.time(), "process": self.process}
        template = self.optuna.trial.create_trial(state=running, user_attrs={**told, **attributes})
        return int(self.storage.create_new_trial(self.study_id, template_trial=template))

    def _describe(self, trial_id: int, config: dict) -> None:
        """Let Optuna's own tools see what the trial tries."""
        rates, seeds = ([c[name] for c in self.configs] for name in ("lr", "seed"))
        methods = list(dict.fromkeys(c["method"] for c in self.configs))
        of = self.optuna.distributions
        spaces = {
            "lr": of.FloatDistribution(min(rates), max(rates)),
            "seed": of.IntDistribution(min(seeds), max(seeds)),
            "method": of.CategoricalDistribution(methods),
        }
        for name, space in spaces.items():
            self.storage.set_trial_param(trial_id, name, space.to_internal_repr(config[name]), space)
        self.storage.set_trial_user_attr(trial_id, "config", config)

    def _set_state(self, trial_id: int, state: str, value: float | None = None) -> None:
        """End a trial, unless it has ended already."""
        with suppress(self.optuna.exceptions.UpdateFinishedTrialError):
            values = None if value is None else [value]
            self.storage.set_trial_state_values(trial_id, self.optuna.trial.TrialState[state], values)


def this_host() -> str:
    """A name for all processes that can see each other, which no two machines share."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"  # a container has numbers of its own
    except OSError:
        return f"{platform.node()} {uuid.getnode():x}"


def is_gone(pid: int) -> bool:
    """Whether no process of this machine has that number; False where that cannot be asked."""
    if os.name != "posix":
        return False
    try:
        os.kill(pid, 0)  # asks, and does nothing
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def signature(configs: Sequence[dict]) -> dict[str, Any]:
    """What tells one sweep from another: a digest of all configurations, and a few words for people."""
    text = "\n".join(key(c) for c in configs)
    what = f"{', '.join(dict.fromkeys(c['method'] for c in configs))} on {configs[0]['data']}"
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "members": len(configs), "what": what}


@contextmanager
def opening(url: str) -> Iterator[None]:
    """Make whatever a driver raises a UsageError of one line."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"--study {url} cannot be opened ({first_line(error)})") from error


def open_storage(url: str, warn: Callable[[str], None] = warnings.warn) -> tuple[Any, Any]:
    """Optuna, and the storage behind `url`."""
    try:
        optuna, journal = (import_module(name) for name in ("optuna", "optuna.storages.journal"))
    except ModuleNotFoundError as error:
        raise UsageError(f'--study needs optuna ({error}): pip install "evenstep[lab]"') from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url.startswith("journal://") or ("://" not in url and Path(url).suffix in (".log", ".journal")):
        return optuna, optuna.storages.JournalStorage(_journal(journal, Path(url.removeprefix("journal://")), warn))
    if "://" in url:
        return optuna, _database(optuna, url)
    raise UsageError(
        f"--study {url} is no study; give a journal file (journal:///path, or a name that ends in .log or .journal) or "
        "a database (sqlite:///file.db, postgresql://…)"
    )


def _journal(journal: Any, path: Path, warn: Callable[[str], None]) -> Any:
    """A journal whose lock is held only after a line that a killed process left unfinished was cut off."""
    path = path.absolute()  # the lock is a link to it
    kind = journal.JournalFileOpenLock if os.name == "nt" else journal.JournalFileSymlinkLock

    class MendingLock(kind):  # type: ignore[misc, valid-type]
        def acquire(self) -> bool:
            super().acquire()
            try:
                if said := mend(path):
                    warn(said)
            except BaseException:
                self.release()
                raise
            return True

    lock = MendingLock(str(path))
    backend = journal.JournalFileBackend(str(path), lock_obj=lock)
    lock.acquire()
    lock.release()
    return backend


def mend(path: Path) -> str | None:
    """Cut off a last line that was not written whole; one line that says so, or None. What is no journal is refused.

    Nobody has read that line: Optuna looks at those that have an end. The text goes to a file beside the journal.
    """
    with path.open("r+b") as file:
        begin = file.read(len(BEGIN))
        if not BEGIN.startswith(begin):
            raise UsageError(f"--study {path} is not a journal of Optuna; choose a file that is not there yet")
        if not begin or (file.seek(-1, os.SEEK_END) and file.read(1) == b"\n"):
            return None
        file.seek(0)
        return records.cut(path, file, file.read().rfind(b"\n") + 1)


def _database(optuna: Any, url: str, tries: int = 5) -> Any:
    """A storage in a database; tried again, since processes that start together may all try to make its tables.

    Files are closed after each use: nobody could close them where Optuna does not come to an end with its start.
    """
    how: dict[str, Any] = {}
    if url.startswith("sqlite"):
        how = {"connect_args": {"timeout": 60}, "poolclass": import_module("sqlalchemy.pool").NullPool}
    for _ in range(tries - 1):
        with suppress(import_module("sqlalchemy.exc").DBAPIError):
            return optuna.storages.RDBStorage(url, engine_kwargs=how)
        time.sleep(random.uniform(0.1, 0.5))
    return optuna.storages.RDBStorage(url, engine_kwargs=how)
