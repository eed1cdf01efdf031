"""Build `native.c` by the machine's C compiler when it is first needed, and load it; do without where that fails.

torch has no operation that makes a step of many blocks, and on the CPU each of the hundred that would make it up costs
more than its arithmetic. The library is built in a second and kept in the user's cache folder, under a name that
changes with the source, the compiler and the processor. EVENSTEP_NATIVE=0 keeps from building or using it.
"""

import ctypes
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..moments import accumulation_dtype
from . import tables

SOURCE = Path(__file__).with_name("native.c")
# by the dtype of weights: what C computes in, and the least number with all its digits
FLOAT = "float", "FLT_MIN"
TYPES = {torch.float32: FLOAT, torch.bfloat16: FLOAT, torch.float64: ("double", "DBL_MIN")}
# what the processor has, as torch knows it: never more, or the library would not run
VECTORS = {"AVX2": "-mavx2 -mfma", "AVX512": "-mavx2 -mfma -mavx512f -mavx512dq -mavx512bw -mavx512vl"}
MOST = 2**18  # numbers of a call beyond which torch's operations, on several threads, are faster
PARTS = 64  # threads at most
SUMS, PER_COLUMN = 11, 7  # values that are worked out for each unit, and for each column
FLAGS = "-std=c11 -O3 -fPIC -shared -fopenmp-simd -fno-fast-math -fno-math-errno -fno-trapping-math"


class Job(ctypes.Structure):
    """`Job` in `native.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("addresses", "shapes", "settings", "vectors", "columns", "layers")),
        *((name, ctypes.c_void_p) for name in ("sums", "motion", "last", "fired")),
        *((name, ctypes.c_int64) for name in ("blocks", "width", "longest", "units")),
        *((name, ctypes.c_double) for name in ("momentum", "floor", "crowd", "least", "steady", "drift")),
        *((name, ctypes.c_int64) for name in ("linear", "even", "given", "guarded", "counted", "parts", "threads")),
        ("parallel", ctypes.c_void_p),
    )


def library(dtype: torch.dtype) -> Any:
    """The functions for weights of this dtype; None where there are none."""
    return loaded(dtype)[0]


@cache
def loaded(dtype: torch.dtype) -> tuple[Any, str]:
    """The library, or None and the reason."""
    if dtype not in TYPES or sys.platform == "win32":
        return None, f"there is none for {dtype} on {sys.platform}"
    if os.environ.get("EVENSTEP_NATIVE", "1") == "0":
        return None, "EVENSTEP_NATIVE is 0"
    try:
        found = opened(command(dtype))
        found.look.restype = found.join.restype = ctypes.c_int64
        found.look.argtypes = found.act.argtypes = found.join.argtypes = [ctypes.c_void_p]
        found.act.restype = None
        whole, halves = found.add_moments, found.add_moments_of_halves
        found.adders = {accumulation_dtype(dtype): whole, torch.bfloat16: halves}  # by an input's dtype
        for add in found.adders.values():
            add.argtypes, add.restype = [*[ctypes.c_void_p] * 5, ctypes.c_int64], None
    except subprocess.CalledProcessError as error:
        return None, f"the C compiler failed: {error.stderr.decode(errors='replace').strip()[-500:]}"
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:  # CC may be anything
        return None, f"it could not be built: {error}"
    return found, ""


@cache
def parallel() -> int | None:
    """The address of what runs a function on torch's own threads: others would only wait for those."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


def command(dtype: torch.dtype) -> list[str]:
    """The compiler with all it is told, apart from files."""
    names = {name: value for name, value in vars(tables).items() if name.isupper() and isinstance(value, int)}
    kind, tiny = TYPES[dtype]
    sizes = {"ROW_OF_ADDRESSES": tables.BIAS_STEP + 1, "MOST_PARTS": PARTS, "SIZE_OF_JOB": ctypes.sizeof(Job)}
    sizes |= {"SUMS": SUMS, "PER_COLUMN": PER_COLUMN}
    defined = {"REAL": kind, "TINY": tiny, "HALF": int(dtype == torch.bfloat16), **sizes, **names}
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "clang"]
    vectors = VECTORS.get(torch.backends.cpu.get_cpu_capability(), "")
    return [*compiler, *FLAGS.split(), *vectors.split(), *(f"-D{name}={value}" for name, value in defined.items())]


def built(command: list[str]) -> Path:
    """The library, built now or before."""
    facts = [SOURCE.read_text(encoding="utf-8"), *command, platform.machine(), *platform.libc_ver()]
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()
    folder, name = kept_in(), f"native-{digest[:24]}.so"
    path = folder / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:  # whole or not at all, whoever else builds it
            made = Path(work) / name
            subprocess.run([*command, str(SOURCE), "-o", str(made), "-lm"], check=True, capture_output=True, timeout=60)
            made.replace(path)
    return path


def opened(command: list[str]) -> Any:
    """The library; one that is damaged, as after a power cut, is built anew."""
    path = built(command)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(built(command)))


def home() -> Path:
    """Where things are kept between runs: EVENSTEP_CACHE, else evenstep/ in the user's cache folder."""
    if os.environ.get("EVENSTEP_CACHE"):
        return Path(os.environ["EVENSTEP_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenstep"


def kept_in() -> Path:
    """A folder of the user's own: code is loaded from it."""
    folders = [Path(tempfile.gettempdir()) / f"evenstep-{os.getuid()}"]
    with suppress(RuntimeError):  # there may be no home
        folders.insert(0, home() / "native")
    for folder in folders:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = folder.stat()
            if about.st_uid == os.getuid() and not about.st_mode & 0o022 and os.access(folder, os.W_OK):
                return folder
    raise PermissionError("there is no folder of this user's own to keep it in")


def shape(size: tuple[int, ...], stride: tuple[int, ...], offset: int, inputs: int) -> Any:
    """Rows of a tensor, its inputs along one dimension, as `add_moments` takes them; None where it does not.

    It goes through dimensions in the order given; with inputs far apart, the longest one is the innermost.
    """
    others = [d for d in range(len(size)) if d != inputs]
    if len(others) > 4 or math.prod(size) > MOST:
        return None
    if stride[inputs] != 1:
        others.sort(key=lambda d: size[d])
    free = 4 - len(others)
    sizes, strides = [1] * free + [size[d] for d in others], [0] * free + [stride[d] for d in others]
    return (ctypes.c_int64 * 11)(size[inputs], stride[inputs], offset, *sizes, *strides)
