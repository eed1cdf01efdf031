"""Make the 5,000 Fashion-MNIST images that the package ships.

    python scripts/make_fashion_subset.py /usr/share/datasets/fashion-mnist [OUT]

The source folder holds the four gzipped idx files, as the data set's authors and Debian's package
`dataset-fashion-mnist` ship them. The choice: of each class the first 400 images of the training set and
the first 100 of the test set (t10k), kept in file order, 28x28, one byte per pixel. The arrays train_x, train_y,
test_x, test_y go into an uncompressed .npz, and that through xz. Same input, numpy and liblzma: same bytes.
Prints the sha256 that `evenstep/lab/data/fashion.py` checks.
"""

import gzip
import hashlib
import io
import lzma
import sys
from pathlib import Path

import numpy as np

ASSET = Path(__file__).parents[1] / "src/evenstep/lab/assets/fashion-mnist-5000.npz.xz"
PER_CLASS = {"train": 400, "t10k": 100}


def read_idx(path: Path) -> np.ndarray:
    """Array of unsigned bytes from a gzipped idx file: magic 0 0 8 ndim, big-endian sizes, data."""
    raw = gzip.decompress(path.read_bytes())
    ndim = raw[3]
    shape = np.frombuffer(raw, ">i4", count=ndim, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def first_per_class(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of the first PER_CLASS[split] examples of each class, in file order."""
    images = read_idx(folder / f"{split}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte.gz")
    rows = np.concatenate([np.flatnonzero(labels == c)[: PER_CLASS[split]] for c in range(10)])
    rows.sort()
    return images[rows], labels[rows]


def main(folder: Path, out: Path = ASSET) -> None:
    train_x, train_y = first_per_class(folder, "train")
    test_x, test_y = first_per_class(folder, "t10k")
    npz = io.BytesIO()
    np.savez(npz, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
    packed = lzma.compress(npz.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    out.write_bytes(packed)
    print(f"{out}: {len(packed):,} bytes, sha256 {hashlib.sha256(packed).hexdigest()}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*(Path(argument) for argument in sys.argv[1:]))
