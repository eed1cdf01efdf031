"""Make the 5,000 Fashion-MNIST images that the package ships, and print their sha256.

    python scripts/make_fashion_subset.py /usr/share/datasets/fashion-mnist OUT

The source folder holds the four gzipped idx files of the data set's authors, as Debian's package
`dataset-fashion-mnist` has them. Of each class the first 400 images of the training set and the first 100 of the test
set, in file order, 28x28, as an uncompressed .npz in xz. Same input, numpy and liblzma: same bytes.
"""

import hashlib
import io
import lzma
import sys
from pathlib import Path

import numpy as np

from evenstep.lab.data import fashion_mnist


def main(folder: str, out: str) -> None:
    full, parts = fashion_mnist(folder), {}
    for split, count in (("train", 400), ("test", 100)):
        images, labels = getattr(full, f"{split}_x").numpy(), getattr(full, f"{split}_y").numpy()
        rows = np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c in range(10)]))
        parts[f"{split}_x"], parts[f"{split}_y"] = images[rows, 0, 2:-2, 2:-2], labels[rows].astype(np.uint8)
    npz = io.BytesIO()
    np.savez(npz, **parts)
    packed = lzma.compress(npz.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    Path(out).write_bytes(packed)
    print(f"{out}: {len(packed):,} bytes, sha256 {hashlib.sha256(packed).hexdigest()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
