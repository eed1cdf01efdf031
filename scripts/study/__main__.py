"""See command.py, or `python scripts/study --help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the folder of the package, instead of the package itself
    from study.command import main

    main()
