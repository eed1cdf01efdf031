"""Curves of records for TensorBoard, if it is installed."""

from collections.abc import Iterable
from pathlib import Path

from .labels import options_label
from .reading import Record
from .usage import UsageError

COLUMNS = ("train_loss", "test_loss", "test_accuracy", "dead_share")


def export(runs: Iterable[Record], folder: Path) -> None:
    """Write each run's columns, a point per epoch, to its own folder below `folder`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError("--tensorboard needs TensorBoard; get it: pip install tensorboard") from error
    for number, run in enumerate(runs):
        with SummaryWriter(str(folder / folder_name(number, run))) as writer:
            for epoch, row in enumerate(run["metrics"], start=1):
                for column in COLUMNS:
                    if row.get(column) is not None:
                        writer.add_scalar(column, row[column], epoch)


def folder_name(number: int, run: Record) -> str:
    """A name for a run's folder, of characters that every file system accepts."""
    config = run["config"]
    words = [f"{number:04}", config["method"], f"lr {config['lr']:g}", f"seed {run.get('seed')}"]
    text = " ".join([*words, options_label(config.get("options") or {})])
    return "".join(c if c.isalnum() or c in "-." else "_" for c in text)[:120].strip("._")
