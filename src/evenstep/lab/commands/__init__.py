"""The commands of `evenstep`, a file each: `Options`, what the command line may say, and `main`, what it does.

A new command is a new file here and its name in COMMANDS.
"""

COMMANDS = ("demo", "reproduce", "sweep", "train", "report", "doctor", "bench")
