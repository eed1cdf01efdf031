"""Run PyTorch's own optimizer tests on ours.

    python scripts/torch_optim_suite.py PATH_TO_PYTORCH/test/test_optim.py [arguments of pytest]

The file is not in the wheel: it comes with PyTorch's source, of the release nearest to the torch installed, with the
folder `optim` beside it. The rows that stand in for torch's are in tests/optim_infos.py; its tests of schedulers run on
`WhitenedSGD`. Needs the `test` extra.
"""

import importlib
import sys
from pathlib import Path

import pytest
from torch.testing._internal import common_optimizers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import optim_infos


def main(arguments: list[str]) -> int:
    """Put our classes in the place of torch's before pytest imports the file; all in this process."""
    if not arguments or not (path := Path(arguments[0]).resolve()).is_file():
        print(f"{__doc__}\nThe path of test_optim.py is wanted; got {' '.join(arguments[:1]) or 'none'}.")
        return 2
    common_optimizers.optim_db[:] = optim_infos.rows()
    sys.path.insert(0, str(path.parent))
    importlib.import_module("optim.test_lrscheduler").SGD = optim_infos.WhitenedSGD
    apart = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", "--rootdir", str(path.parent)]
    return int(pytest.main([*apart, str(path), *arguments[1:]]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
