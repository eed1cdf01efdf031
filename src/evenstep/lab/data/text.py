"""A text file, by character."""

from pathlib import Path

import torch

from .arrays import Text

SHORTEST = 10_000


def text_file(path: Path | str) -> Text:
    """A text file in UTF-8, by character."""
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error}.") from error
    if len(content) < SHORTEST:
        raise ValueError(f"{path}: a text of at least {SHORTEST:,} characters is needed; this one has {len(content)}.")
    vocabulary = "".join(sorted(set(content)))
    number = {character: k for k, character in enumerate(vocabulary)}
    tokens = torch.tensor([number[character] for character in content])
    split = len(tokens) * 9 // 10
    return Text(tokens[:split], tokens[split:], path.stem, vocabulary)
