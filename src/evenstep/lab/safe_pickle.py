"""Read numpy pickles from untrusted files: only names of a short list are ever looked up."""

import _codecs
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np


def _dtype(code: Any, align: Any = False, copy: Any = False) -> np.dtype:
    """`numpy.dtype` where old pickles have 0 and 1 for booleans."""
    return np.dtype(code, bool(align), bool(copy))


_RECONSTRUCT: Callable = np.empty(0).__reduce__()[0]  # type: ignore[assignment]
_SCALAR: Callable = np.float64(0).__reduce__()[0]  # type: ignore[assignment]
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")  # before numpy 2, and since

ALLOWED: dict[tuple[str, str], Any] = {
    **{(module, "_reconstruct"): _RECONSTRUCT for module in _MULTIARRAY},
    **{(module, "scalar"): _SCALAR for module in _MULTIARRAY},
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _codecs.encode,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that resolves the names in `ALLOWED` and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a data file has no use for")
        return ALLOWED[module, name]


def loads(content: bytes, where: str) -> Any:
    """The object in `content`, of builtin containers and numpy arrays; Python 2's strings become bytes.

    An error is a ValueError that says `where` it was.
    """
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"{where}: not a readable pickle: {error}") from error
