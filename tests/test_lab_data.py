"""The embedded images, the CIFAR-10 reader on files it should and should not read, and the batches."""

import gzip
import lzma
import pickle
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from evenstep.lab import data, safe_pickle
from small_images import small_arrays

FASHION_SOURCE = Path("/usr/share/datasets/fashion-mnist")
BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]


def test_embedded_images_are_balanced_and_padded():
    arrays = data.fashion_mnist_subset()
    assert arrays.train_x.shape == (4000, 1, 32, 32) and arrays.train_x.dtype == torch.uint8
    assert arrays.test_x.shape == (1000, 1, 32, 32) and arrays.test_y.dtype == torch.int64
    assert torch.bincount(arrays.train_y).tolist() == [400] * 10
    assert torch.bincount(arrays.test_y).tolist() == [100] * 10
    border = arrays.train_x.clone()
    border[:, :, 2:-2, 2:-2] = 0
    assert border.sum() == 0 and arrays.train_x.float().mean() > 40


@pytest.mark.skipif(not FASHION_SOURCE.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_embedded_images_are_the_first_of_each_class():
    raw = gzip.decompress((FASHION_SOURCE / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((FASHION_SOURCE / "t10k-labels-idx1-ubyte.gz").read_bytes())[8:]
    seen, chosen = dict.fromkeys(range(10), 0), []
    for i, label in enumerate(labels):
        seen[label] += 1
        if seen[label] <= 100:
            chosen.append(raw[784 * i : 784 * (i + 1)])
    arrays = data.fashion_mnist_subset()
    assert arrays.test_x[:, 0, 2:-2, 2:-2].numpy().tobytes() == b"".join(chosen)


def test_damaged_embedded_file_is_named(tmp_path):
    whole = resources.files("evenstep.lab").joinpath("assets", data.FASHION_FILE).read_bytes()
    path = tmp_path / "images.npz.xz"
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"images\.npz\.xz: sha256 is .* damaged"):
        data.fashion_mnist_subset(path)
    assert len(lzma.decompress(whole)) > 5000 * 784


def test_licence_lies_beside_the_images():
    text = resources.files("evenstep.lab").joinpath("assets", "fashion-mnist-LICENSE.txt").read_text(encoding="utf-8")
    assert "Zalando" in text and "MIT" in text


def cifar_batch(count=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), rng.integers(0, 10, count).tolist()


def write_cifar(folder, **replaced):
    """A folder of small batch files; `replaced` gives the bytes of some of them."""
    folder.mkdir(parents=True, exist_ok=True)
    truth = {}
    for seed, name in enumerate(BATCHES):
        pixels, labels = truth[name] = cifar_batch(seed=seed)
        content = pickle.dumps({b"batch_label": name.encode(), b"labels": labels, b"data": pixels}, protocol=2)
        (folder / name).write_bytes(replaced.get(name, content))
    return truth


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


@pytest.mark.parametrize("given", ["", "cifar-10-batches-py"])
def test_cifar_reads_our_files_and_the_original_format(tmp_path, given):
    folder = tmp_path / "cifar-10-batches-py"
    pixels, labels = cifar_batch(seed=7)
    truth = write_cifar(folder, data_batch_2=python2_batch(pixels, labels))
    truth["data_batch_2"] = pixels, labels
    arrays = data.cifar10(tmp_path / given)
    assert arrays.train_x.shape == (20, 3, 32, 32) and arrays.channels == 3
    wanted = np.concatenate([truth[name][0] for name in BATCHES[:5]]).reshape(-1, 3, 32, 32)
    assert np.array_equal(arrays.train_x.numpy(), wanted)
    assert arrays.train_y.tolist() == [label for name in BATCHES[:5] for label in truth[name][1]]
    assert arrays.test_y.tolist() == truth["test_batch"][1]


class Malicious:
    """Creates a file when it is unpickled by a trusting reader."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return Path.touch, (self.victim,)


def test_malicious_pickle_does_not_run(tmp_path):
    victim = tmp_path / "executed"
    evil = pickle.dumps({b"data": Malicious(victim), b"labels": []}, protocol=2)
    pickle.loads(evil)
    assert victim.exists(), "the pickle must be one that would run"
    victim.unlink()
    write_cifar(tmp_path, data_batch_3=evil)
    with pytest.raises(ValueError, match=r"data_batch_3: not a readable pickle: it refers to .*, which a data file"):
        data.cifar10(tmp_path)
    assert not victim.exists()


@pytest.mark.parametrize(
    "name", [("builtins", "eval"), ("os", "system"), ("numpy", "load"), ("numpy.core.multiarray", "fromfile")]
)
def test_only_listed_names_can_be_looked_up(tmp_path, name):
    path = tmp_path / "file"
    path.write_bytes(b"\x80\x02c" + "\n".join(name).encode() + b"\n.")
    with pytest.raises(ValueError, match=f"it refers to {name[0]}.{name[1]}"):
        safe_pickle.load(path)


def as_batch(**parts):
    return pickle.dumps({key.encode(): value for key, value in parts.items()}, protocol=2)


PIXELS, LABELS = cifar_batch()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (as_batch(data=PIXELS, labels=LABELS)[:-2000], "not a readable pickle"),
        (b"", "not a readable pickle"),
        (b"not a pickle at all", "not a readable pickle"),
        (pickle.dumps([1, 2], protocol=2), "should be a dict with b'data' and b'labels'"),
        (as_batch(data=PIXELS), "should be a dict with b'data' and b'labels'"),
        (as_batch(data=PIXELS[:, :-1], labels=LABELS), r"shape \[N, 3072\]; got uint8 of shape \[4, 3071\]"),
        (as_batch(data=PIXELS.astype(np.float32), labels=LABELS), r"got float32 of shape \[4, 3072\]"),
        (as_batch(data=7, labels=LABELS), "got int"),
        (as_batch(data=PIXELS, labels=LABELS[:-1]), "a list of 4 numbers; got list of length 3"),
        (as_batch(data=PIXELS, labels=[0, 1, 2, 10]), "from 0 to 9; found 10"),
        (as_batch(data=PIXELS, labels=[0, 1, 2, -1]), "from 0 to 9; found -1"),
        (as_batch(data=PIXELS, labels=[0, 1, 2, "3"]), "from 0 to 9; found '3'"),
    ],
)
def test_bad_cifar_file_is_named_with_the_reason(tmp_path, content, reason):
    write_cifar(tmp_path, test_batch=content)
    with pytest.raises(ValueError, match=f"test_batch: .*{reason}"):
        data.cifar10(tmp_path)


def test_missing_cifar_file_is_named(tmp_path):
    write_cifar(tmp_path)
    (tmp_path / "data_batch_4").unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_4: no such file"):
        data.cifar10(tmp_path)


def test_normalization_is_that_of_the_training_set():
    arrays = small_arrays()
    x = arrays.train_x.double()
    mean, std = arrays.mean_std
    torch.testing.assert_close(mean.flatten().double(), x.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(std.flatten().double(), x.std((0, 2, 3), correction=0), rtol=1e-6, atol=0)


def test_a_constant_channel_stays_finite():
    arrays = small_arrays(channels=1)
    arrays.train_x.fill_(9)
    assert arrays.normalize(arrays.train_x).abs().max() == 0


def test_batches_hold_every_example_once_in_a_seeded_order():
    arrays = small_arrays()

    def epoch(seed):
        return list(data.batches(arrays, 4, torch.Generator().manual_seed(seed)))

    first, again, other = epoch(1), epoch(1), epoch(2)
    assert [len(y) for _, y in first] == [4, 4, 2]
    assert sorted(torch.cat([y for _, y in first]).tolist()) == list(range(10))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for (_, a), (_, b) in zip(first, other, strict=True))
    for x, y in first:
        torch.testing.assert_close(x, arrays.normalize(arrays.train_x[y]))


def test_crops_and_flips_against_a_loop():
    x = small_arrays(count=6).train_x
    result = data.crop_and_flip(x, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    shift = torch.randint(0, 9, (2, 6, 1), generator=generator)
    mirrored = torch.randint(0, 2, (6, 1), generator=generator)
    assert 0 < mirrored.sum() < 6, "both cases must occur"
    for i in range(6):
        top, left = shift[0, i, 0] - 4, shift[1, i, 0] - 4
        rows, columns = ((torch.arange(32) + first).abs() for first in (top, left))
        rows, columns = (torch.where(k > 31, 62 - k, k) for k in (rows, columns))  # the image's own reflection
        wanted = x[i][:, rows][:, :, columns]
        assert torch.equal(result[i], wanted.flip(2) if mirrored[i] else wanted)
