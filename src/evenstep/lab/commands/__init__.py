"""The commands of `evenstep`: `Options`, a command's arguments, and `main`, which carries them out.

A new command is a new file here and a row in COMMANDS.
"""

COMMANDS = {
    "demo": "run_demo",
    "reproduce": "run_reproduction",
    "init": "run_init",
    "tune": "run_tune",
    "sweep": "run_sweep",
    "train": "run_training",
    "report": "run_report",
    "doctor": "run_doctor",
    "bench": "run_bench",
    "compare": "run_compare",
}
