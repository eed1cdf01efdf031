"""`python -m evenstep`: the command line of the experiments."""

from .lab.cli import main

if __name__ == "__main__":
    main()
