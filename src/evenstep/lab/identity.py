"""Which data a run was on: their name, and a digest that tells them from others of the same name."""

import hashlib
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import records
from .data import Arrays, Text
from .data.fashion import FASHION_NAME
from .usage import UsageError

DIGEST = "data_digest"
_digests: "weakref.WeakKeyDictionary[Arrays | Text, str]" = weakref.WeakKeyDictionary()


def described(data: Arrays | Text) -> dict[str, str]:
    """What a configuration says of the data; the shipped images, which are always the same, have no digest."""
    if data.name.startswith(FASHION_NAME):
        return {"data": data.name}
    return {"data": data.name, DIGEST: digest(data)}


def digest(data: Arrays | Text) -> str:
    """Twelve digits from all bytes of the data, wherever they lie; read once for each object."""
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


def may_be_of(config: dict[str, Any], data: Arrays | Text) -> bool:
    """Whether a configuration names these data, and has their digest or, as older ones, none."""
    mine = described(data)
    return config.get("data") == data.name and config.get(DIGEST) in (None, mine.get(DIGEST))


def by_key(runs: Iterable[records.Record], data: Arrays | Text, path: Path) -> dict[str, records.Record]:
    """Records by their configuration; one of data of that name without a digest, as older ones are, counts as of these.

    A record of other data of the same name is a UsageError: nobody could tell the two apart in a report.
    """
    mine, found = records.plain(described(data)), {}
    for record in runs:
        config = record["config"]
        if config.get("data") == data.name:
            if not may_be_of(config, data):
                raise UsageError(
                    f"{path} holds runs on other data called {data.name} (digest {config[DIGEST]}, of these "
                    f"{mine.get(DIGEST)}); choose another --out, or give the data another name"
                )
            config = {**config, **mine}
        found[records.dumps(config)] = record
    return found


def without_digest(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as it was written before there were digests."""
    return {name: value for name, value in config.items() if name != DIGEST}
