"""The storage of a study: a database, or a journal file that survives killed processes."""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from . import records
from .locking import locked
from .usage import UsageError, first_line

NAME = "evenstep"
JOURNAL = b'{"op_code":'  # the beginning of an Optuna journal
KINDS = "a journal file (journal:///path, or a name that ends in .log or .journal) or a database (sqlite:///file.db, …)"


def joined(url: str, members: Sequence[str], warn: Callable[[str], None]) -> tuple[Any, Any, int]:
    """Optuna, the storage behind `url`, and the id of its study, created if need be; other members are refused."""
    digest = hashlib.sha256("\n".join(members).encode()).hexdigest()
    try:
        optuna, storage = opened(url, warn)
        study = optuna.create_study(storage=storage, study_name=NAME, load_if_exists=True)
        if NAME not in study.user_attrs:
            study.set_user_attr(NAME, digest)
        study_id, theirs = storage.get_study_id_from_name(NAME), study.user_attrs[NAME]
    except UsageError:
        raise
    except Exception as error:  # drivers raise many kinds
        raise UsageError(f"--study {url} cannot be opened ({first_line(error)})") from error
    if theirs != digest:
        raise UsageError(f"--study {url} holds another sweep; give the same data and options, or another study")
    return optuna, storage, study_id


def opened(url: str, warn: Callable[[str], None]) -> tuple[Any, Any]:
    """Optuna, and the storage behind `url`."""
    try:
        optuna, journal = (import_module(name) for name in ("optuna", "optuna.storages.journal"))
    except ModuleNotFoundError as error:
        raise UsageError(f'--study needs optuna ({error}): pip install "evenstep[lab]"') from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url.startswith("journal://") or ("://" not in url and Path(url).suffix in (".log", ".journal")):
        path = Path(url.removeprefix("journal://"))
        lock = JournalLock(path, warn)
        lock.acquire()  # refuses a file that is no journal
        lock.release()
        return optuna, optuna.storages.JournalStorage(journal.JournalFileBackend(str(path), lock_obj=lock))
    if "://" not in url:
        raise UsageError(f"--study {url} is no study; give {KINDS}")
    how: dict[str, Any] = {}
    if url.startswith("sqlite"):  # NullPool closes the file after each use
        how = {"connect_args": {"timeout": 60}, "poolclass": import_module("sqlalchemy.pool").NullPool}
    for wait in (0.1, 0.3, 1.0):  # processes that start together may all try to create the tables
        with suppress(import_module("sqlalchemy.exc").DBAPIError):
            return optuna, optuna.storages.RDBStorage(url, engine_kwargs=how)
        time.sleep(wait)
    return optuna, optuna.storages.RDBStorage(url, engine_kwargs=how)


class JournalLock:
    """Optuna's interface to a lock, on a journal: a line that a killed process left half-written is cut off first.

    Optuna reads only lines with an end, so nobody has read that line. Its text goes to a file beside the journal.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self.warn = path, warn
        self.held: AbstractContextManager[IO[bytes]] | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        held = locked(self.path)
        file = held.__enter__()
        try:
            self._repair(file)
        except BaseException:
            held.__exit__(None, None, None)
            raise
        self.held = held
        return True

    def release(self) -> None:
        """Let others in."""
        held, self.held = self.held, None
        if held is not None:
            held.__exit__(None, None, None)

    def _repair(self, file: IO[bytes]) -> None:
        begin = file.read(len(JOURNAL))
        if not JOURNAL.startswith(begin):
            raise UsageError(f"--study {self.path} is not a journal of Optuna; choose a file that does not exist yet")
        if begin and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.seek(0)
            self.warn(records.cut(self.path, file, file.read().rfind(b"\n") + 1))
