"""The identity of a run's data: their name, and a digest that tells them from others of the same name."""

import hashlib
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import records
from .data import Arrays, Text
from .data.fashion import FASHION_NAME
from .reading import Record
from .usage import UsageError
from .user_task import Data, UserTask

DIGEST = "data_digest"
_digests: "weakref.WeakKeyDictionary[Arrays | Text, str]" = weakref.WeakKeyDictionary()


def described(data: Data) -> dict[str, Any]:
    """The data in a configuration; the images in the package, which never change, have no digest.

    A user's file is known by its text, and judged by its held-out loss.
    """
    if isinstance(data, UserTask):
        steps = {} if data.steps is None else {"steps": data.steps}
        return {"data": data.name, DIGEST: data.digest, "judged_by": "test_loss", **steps}
    if data.name.startswith(FASHION_NAME):
        return {"data": data.name}
    return {"data": data.name, DIGEST: digest(data)}


def digest(data: Arrays | Text) -> str:
    """Twelve digits from all bytes of the data, on every device the same; computed once per object."""
    if data not in _digests:
        found, names = hashlib.sha256(), ["train_x", "train_y", "test_x", "test_y"]
        if isinstance(data, Text):
            found, names = hashlib.sha256(data.vocabulary.encode()), ["train", "test"]
        for name in names:
            tensor = getattr(data, name)
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().view(-1).numpy())
        _digests[data] = found.hexdigest()[:12]
    return _digests[data]


def by_key(runs: Iterable[Record], data: Data, path: Path) -> dict[str, Record]:
    """Records by configuration; one of data of that name without a digest counts as one of these data.

    A record of other data of the same name is a UsageError: a report could not tell the two apart.
    """
    mine, found = records.plain(described(data)), {}
    for record in runs:
        config = record["config"]
        if config.get("data") == data.name:
            if config.get(DIGEST) not in (None, mine.get(DIGEST)):
                if isinstance(data, UserTask):
                    raise UsageError(
                        f"{path} holds runs of another {data.path}: its text has changed since; choose another --out, "
                        f"or bring back the file as it was"
                    )
                raise UsageError(
                    f"{path} holds runs on other data called {data.name} (digest {config[DIGEST]}, of these "
                    f"{mine.get(DIGEST)}); choose another --out, or give the data another name"
                )
            config = {**config, DIGEST: mine[DIGEST]} if DIGEST in mine else config
        found[records.dumps(config)] = record
    return found


def without_digest(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as it was written before digests existed."""
    return {name: value for name, value in config.items() if name != DIGEST}
