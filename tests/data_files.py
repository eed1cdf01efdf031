"""Small data sets as files, in every format that `load` reads."""

import gzip
import pickle
import tarfile

import numpy as np
from PIL import Image

BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]


def cifar_batch(count=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), rng.integers(0, 10, count).tolist()


def python2_batch(pixels, labels):
    """The bytes that Python 2 and an old numpy wrote for {"data": pixels, "labels": labels}: the original archive."""

    def string(text):
        raw = text if isinstance(text, bytes) else text.encode()
        return b"T" + len(raw).to_bytes(4, "little") + raw

    def integer(value):
        return b"J" + int(value).to_bytes(4, "little", signed=True)

    dtype = b"cnumpy\ndtype\n(" + string("u1") + integer(0) + integer(1) + b"tR("
    dtype += integer(3) + string("|") + b"NNN" + integer(-1) * 2 + integer(0) + b"tb"
    shape = b"(" + integer(pixels.shape[0]) + integer(pixels.shape[1]) + b"t"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + integer(0) + b"t" + string("b") + b"tR("
    array += integer(1) + shape + dtype + b"\x89" + string(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(integer(label) for label in labels) + b"e"
    return b"\x80\x02}(" + string("data") + array + string("labels") + numbers + b"u."


def write_cifar(folder, **replaced):
    """A folder of small batch files; `replaced` gives the bytes of some of them, or None for no file."""
    folder.mkdir(parents=True, exist_ok=True)
    truth = {}
    for seed, name in enumerate(BATCHES):
        pixels, labels = truth[name] = cifar_batch(seed=seed)
        content = pickle.dumps({b"batch_label": name.encode(), b"labels": labels, b"data": pixels}, protocol=2)
        if replaced.get(name, content) is not None:
            (folder / name).write_bytes(replaced.get(name, content))
    return truth


def write_archive(path, **replaced):
    """CIFAR-10's archive as it comes, with one file more than is wanted, and its folder beside it."""
    folder = path.parent / "cifar-10-batches-py"
    write_cifar(folder, **replaced)
    (folder / "readme.html").write_text("hello")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)


def idx_bytes(array):
    return bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_idx(folder, zipped=True, first=9, **replaced):
    """A folder of MNIST's four files with a few images each; `train_images=…` and the like as for CIFAR-10."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, truth = np.random.default_rng(0), {}
    for half, count in (("train", 12), ("t10k", 5)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.array([first, 0, 0, 3, 0, 2, 7, 2, 5, 5, 1, 1][:count], np.uint8)
        truth[half] = images, labels
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = replaced.get(f"{half}_{kind[:6]}", idx_bytes(array))
            if content is not None:
                path = folder / (f"{half}-{kind}-ubyte" + ".gz" * zipped)
                path.write_bytes(gzip.compress(content) if zipped else content)
    return truth


def write_images(root, size=(32, 32), splits=("train", "val"), classes=("ape", "bee"), count=3, bad=None):
    """An ImageFolder of PNG files of one colour each, and `bad` as another file; the colours by file."""
    rng, colours = np.random.default_rng(0), {}
    for split in splits:
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                path = folder / f"{k}.png"
                colours[path] = tuple(rng.integers(0, 256, 3).tolist())
                Image.new("RGB", size, colours[path]).save(path)
    if bad is not None:
        (root / "val" / "bee" / "bad.jpg").write_bytes(bad)
    return colours


def write_text(path, length=20_000):
    path.write_text(("to be or not to be\n" * length)[:length], encoding="utf-8")
    return path
