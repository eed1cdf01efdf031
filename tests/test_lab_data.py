"""The readers, on files they should and should not read; what `load` recognises; batches and augmentation."""

import gzip
import io
import pickle
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_files import (
    BATCHES,
    cifar_batch,
    idx_bytes,
    python2_batch,
    write_archive,
    write_cifar,
    write_idx,
    write_images,
    write_text,
)
from evenstep.lab import data, loader, safe_pickle
from evenstep.lab.data import loading
from evenstep.lab.usage import UsageError
from lab_helpers import small_arrays


def test_embedded_images_are_balanced_and_padded():
    arrays = data.fashion_mnist_subset()
    assert arrays.train_x.shape == (4000, 1, 32, 32) and arrays.train_x.dtype == torch.uint8
    assert arrays.test_x.shape == (1000, 1, 32, 32) and arrays.test_y.dtype == torch.int64
    assert torch.bincount(arrays.train_y).tolist() == [400] * 10
    assert torch.bincount(arrays.test_y).tolist() == [100] * 10
    licence = resources.files("evenstep.lab").joinpath("assets", "fashion-mnist-LICENSE.txt")
    assert "MIT" in licence.read_text(encoding="utf-8")
    border = arrays.train_x.clone()
    border[:, :, 2:-2, 2:-2] = 0
    assert border.sum() == 0 and arrays.train_x.float().mean() > 40


def test_damaged_embedded_file_is_named(tmp_path):
    whole = resources.files("evenstep.lab").joinpath("assets", data.FASHION_FILE).read_bytes()
    path = tmp_path / "images.npz.xz"
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"images\.npz\.xz: sha256 is .* damaged"):
        data.fashion_mnist_subset(path)


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


@pytest.mark.parametrize("name", ["builtins eval", "os system", "numpy load", "numpy.core.multiarray fromfile"])
def test_only_listed_names_can_be_looked_up(name):
    content = b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n."
    with pytest.raises(ValueError, match=f"here: not a readable pickle: it refers to {name.replace(' ', '.')}"):
        safe_pickle.loads(content, "here")


def test_cifar_archive_is_read_as_its_folder_is(tmp_path):
    folder, archive = tmp_path / "cifar-10-batches-py", tmp_path / "cifar-10-python.tar.gz"
    write_archive(archive)
    before = sorted(tmp_path.rglob("*"))
    packed, unpacked = data.load(archive), data.load(folder)
    assert torch.equal(packed.train_x, unpacked.train_x) and torch.equal(packed.test_y, unpacked.test_y)
    assert sorted(tmp_path.rglob("*")) == before, "nothing is unpacked on disk"


def test_a_copy_of_cifar_is_called_one_unless_it_is_named(tmp_path, monkeypatch):
    write_cifar(tmp_path)
    assert data.cifar10(tmp_path).name == "CIFAR-10 (altered copy)"
    assert data.cifar10(tmp_path, "CIFAR-10 (JPEG)").name == "CIFAR-10 (JPEG)"
    digest = data.cifar.hashlib.md5((tmp_path / "test_batch").read_bytes()).hexdigest()
    monkeypatch.setattr(data.cifar, "ORIGINAL_TEST_MD5", digest)
    assert data.cifar10(tmp_path).name == "CIFAR-10"


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_are_read_and_padded(tmp_path, zipped):
    truth = write_idx(tmp_path / "images", zipped)
    arrays = data.load(tmp_path / "images")
    assert arrays.name == "Fashion-MNIST" and arrays.classes == data.FASHION_CLASSES
    assert arrays.train_x.shape == (12, 1, 32, 32) and arrays.test_y.tolist() == truth["t10k"][1].tolist()
    assert np.array_equal(arrays.train_x[:, 0, 2:-2, 2:-2].numpy(), truth["train"][0])
    assert arrays.train_x.sum() == int(truth["train"][0].sum(dtype=np.int64))
    write_idx(tmp_path / "digits", zipped, first=5)
    assert data.load(tmp_path / "digits").name == "digits"


def test_image_folder_is_decoded_resized_and_labelled_by_name(tmp_path):
    root = tmp_path / "zoo"
    colours = write_images(root, size=(50, 40))
    arrays = data.image_folder(root, size=16)
    assert arrays.name == "zoo (2 classes, 16x16)" and arrays.classes == ("ape", "bee")
    assert arrays.train_x.shape == (6, 3, 16, 16) and arrays.train_x.dtype == torch.uint8
    assert arrays.train_y.tolist() == arrays.test_y.tolist() == [0, 0, 0, 1, 1, 1]
    wanted = torch.tensor([colours[p] for p in sorted(colours) if "train" in p.parts])
    assert torch.equal(arrays.train_x[:, :, 3, 7], wanted.byte())


def test_images_become_rgb_and_lose_what_is_beside_their_middle_square(tmp_path):
    write_images(tmp_path / "zoo", size=(8, 8))
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, :8], wide[:, 8:16], wide[:, 16:] = 50, 100, 200
    Image.fromarray(wide).save(tmp_path / "zoo" / "train" / "ape" / "0.png")
    for k, mode in enumerate(("L", "P", "RGBA")):
        Image.new("RGB", (32, 32), (51, 51, 51)).convert(mode).save(tmp_path / "zoo" / "val" / "bee" / f"{k}.png")
    arrays = data.image_folder(tmp_path / "zoo", 8)
    assert (arrays.train_x[0] == 100).all() and (arrays.test_x[3:] == 51).all()


def test_text_is_numbers_of_characters(tmp_path):
    text = data.load(write_text(tmp_path / "play.txt"))
    assert isinstance(text, data.Text) and text.name == "play" and text.channels == len(set("to be or not to be\n"))
    assert (len(text.train), len(text.test)) == (18_000, 2_000)
    assert "".join(text.vocabulary[k] for k in text.train[:18]) == "to be or not to be"


def test_load_knows_what_it_looks_at(tmp_path):
    write_cifar(tmp_path / "all" / "cifar-10-batches-py")
    write_idx(tmp_path / "idx")
    write_images(tmp_path / "all" / "zoo", size=(40, 40))
    write_text(tmp_path / "play.txt")
    assert data.load("fashion").name.startswith("Fashion-MNIST")
    assert data.load(tmp_path / "all", name="mine").name == "mine"
    assert data.load(str(tmp_path / "all" / "zoo"), size=8).train_x.shape == (6, 3, 8, 8)
    assert loading.recognise(tmp_path / "idx") == ["idx"] and loading.recognise(tmp_path) == []
    assert data.find(tmp_path / "all", "folder") == tmp_path / "all" / "zoo"
    assert data.find(tmp_path, "text") == tmp_path / "play.txt" and data.find(tmp_path / "all", "idx") is None
    write_images(tmp_path / "all")  # beside CIFAR-10, in one folder
    assert data.find(tmp_path / "all", "cifar") == data.find(tmp_path / "all", "folder") == tmp_path / "all"


PIXELS, LABELS = cifar_batch()
GZIP, JPEG = gzip.compress(np.random.default_rng(0).bytes(5000)), io.BytesIO()
Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(JPEG, "JPEG")


def cifar(content=None, labels=LABELS, pixels=PIXELS):
    batch = pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2) if content is None else content
    return partial(write_cifar, test_batch=batch)


def zeros(*shape):
    return idx_bytes(np.zeros(shape, np.uint8))


def file(content):
    return lambda path: path.write_bytes(content)


def cut(write, keep, name=""):
    """What `write` writes, with only the first bytes of one file."""

    def write_and_cut(path):
        write(path)
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[:keep])

    return write_and_cut


NOT_READ, NO_ARCHIVE = "not a readable pickle", ": not a readable archive"
NO_DICT = "should be a dict with b'data' and b'labels'"
BAD = [  # what is loaded, how it came to be there, and the reason why it cannot be
    ("fashoin", None, r"did you mean 'fashion'\?"),
    ("x" * 300, None, "File name too long"),
    ("cifar-10-batch-py", lambda path: path.with_name("cifar-10-batches-py").mkdir(), "cifar-10-batches-py'\\?"),
    ("empty", Path.mkdir, "nothing known is there; a folder should hold cifar-10-batches-py"),
    ("cifar", partial(write_cifar, data_batch_4=None), "data_batch_4: no such file"),
    ("cifar", cifar(pickle.dumps({b"data": PIXELS, b"labels": LABELS})[:-2000]), f"test_batch: {NOT_READ}"),
    ("cifar", cifar(b""), f"test_batch: {NOT_READ}"),
    ("cifar", cifar(pickle.dumps([1, 2], protocol=2)), f"test_batch: .*{NO_DICT}"),
    ("cifar", cifar(pixels=PIXELS[:, :-1]), r"test_batch: .*shape \[N, 3072\]; got uint8 of shape \[4, 3071\]"),
    ("cifar", cifar(labels=LABELS[:-1]), "test_batch: .*a list of 4 numbers; got list of length 3"),
    *(("cifar", cifar(labels=[0, 1, 2, no]), f"test_batch: .*from 0 to 9; found {no!r}") for no in (10, -1, "3")),
    *(("cifar.tar.gz", cut(write_archive, keep), NO_ARCHIVE) for keep in (100, 30_000, -20)),
    ("cifar.tar.gz", partial(write_archive, data_batch_5=None), "data_batch_5 is not in the archive"),
    ("cifar.tar.gz", partial(write_archive, test_batch=b"no"), f"cifar.tar.gz, .*-py/test_batch: {NOT_READ}"),
    ("broken.tar.gz", file(b"\x1f\x8b rubbish"), NO_ARCHIVE),
    ("other.zip", file(b"PK rubbish"), NO_ARCHIVE),
    ("spoilt.gz", file(GZIP[:10] + b"\xff" * 100), NO_ARCHIVE),
    ("idx", partial(write_idx, train_images=zeros(12, 28, 28)[:-1]), "train-images.*.gz: .*9408 bytes .* 9407 do"),
    ("idx", partial(write_idx, train_images=b"\0\0\x08\x03\0\0"), "train-images.*.gz: not an idx file"),
    ("idx", partial(write_idx, train_images=zeros(12, 40, 28)), "train-images.*.gz: .*at most 32x32 .* got 12x40x28"),
    ("idx", partial(write_idx, train_images=zeros(0, 28, 28)), "train-images.*.gz: .*got 0x28x28"),
    ("idx", partial(write_idx, t10k_labels=zeros(4)), "t10k-labels.*.gz: .*5 labels are needed.* got 4"),
    ("idx", partial(write_idx, t10k_labels=idx_bytes(np.full(5, 10, np.uint8))), "t10k-labels.*from 0 to 9; found 10"),
    ("idx", cut(write_idx, -50, "t10k-images-idx3-ubyte.gz"), r"t10k-images-idx3-ubyte\.gz: not a readable gzip file"),
    ("idx", partial(write_idx, t10k_images=None), "t10k-images-idx3-ubyte: no such file, nor"),
    ("zoo", partial(write_images, bad=JPEG.getvalue()[:1500]), r"bad\.jpg: not a readable image: .*truncated"),
    ("zoo", partial(write_images, bad=b""), r"bad\.jpg: not a readable image: .*cannot identify image file"),
    ("zoo", partial(write_images, classes=("ape",)), "train: at least two folders of images are needed.*found 1"),
    ("zoo", partial(write_images, splits=("train",)), "train/ with val/ or test/"),
    ("zoo", partial(write_images, count=0), "train/ape: no image in it"),
    ("zoo", lambda path: (write_images(path), (path / "val/cat").mkdir()), "val/cat: no class of that name in train"),
    ("short.txt", partial(write_text, length=50), "a text of at least 10,000 characters .* 50"),
    ("bytes.txt", file(b"\xff" * 20_000), "not a text in UTF-8"),
]


@pytest.mark.parametrize(("name", "write", "reason"), BAD)
def test_what_cannot_be_loaded_is_one_line_with_the_file_and_the_reason(name, write, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if write is not None:
        write(Path(name))
    with pytest.raises(UsageError, match=reason) as caught:
        data.load(name)
    told = str(caught.value)
    assert told.startswith(f"--data {name}: ") and told.count(f"{name}: ") == 1 and "\n" not in told


def test_subset_is_drawn_once_and_for_all():
    arrays = small_arrays()
    part, again, other = arrays.subset(4), arrays.subset(4), arrays.subset(4, seed=1)
    assert torch.equal(part.train_y, again.train_y) and not torch.equal(part.train_y, other.train_y)
    assert torch.equal(part.train_x, arrays.train_x[part.train_y]) and part.name == "random, 4 of 10"
    assert part.test_x is arrays.test_x and arrays.subset(10) is arrays
    with pytest.raises(ValueError, match="between 1 and 10 images; got 11"):
        arrays.subset(11)


def test_normalization_is_that_of_the_training_set():
    arrays = small_arrays()
    x = arrays.train_x.double()
    mean, std = arrays.mean_std
    torch.testing.assert_close(mean.flatten().double(), x.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(std.flatten().double(), x.std((0, 2, 3), correction=0), rtol=1e-6, atol=0)
    constant = small_arrays(channels=1)
    constant.train_x.fill_(9)
    assert constant.normalize(constant.train_x).abs().max() == 0


def test_batches_hold_every_example_once_in_a_seeded_order():
    arrays = small_arrays()

    def epoch(seed):
        return list(loader.epoch_batches(arrays, 4, torch.Generator().manual_seed(seed)))

    first, again, other = epoch(1), epoch(1), epoch(2)
    assert [len(y) for _, y in first] == [4, 4, 2]
    assert sorted(torch.cat([y for _, y in first]).tolist()) == list(range(10))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for (_, a), (_, b) in zip(first, other, strict=True))
    for x, y in first:
        torch.testing.assert_close(x, arrays.normalize(arrays.train_x[y]))


def test_crops_and_flips_against_a_loop():
    x = small_arrays(count=6).train_x
    result = loader.crop_and_flip(x, torch.Generator().manual_seed(3))
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


def test_cutout_hides_one_square_of_each_image():
    x = torch.ones(200, 2, 32, 32)
    result = loader.cutout(x, torch.Generator().manual_seed(0), side=8)
    hidden = 1 - result
    assert torch.equal(hidden[:, 0], hidden[:, 1]), "the same place in every channel"
    rows, columns = hidden[:, 0].amax(2).sum(1), hidden[:, 0].amax(1).sum(1)
    assert torch.equal(hidden[:, 0].sum((1, 2)), rows * columns), "a rectangle"
    assert rows.max() == columns.max() == 8 and rows.min() == columns.min() == 4, "a square, cut by the border"
    assert hidden.mean(0).min() > 0, "any pixel can be hidden"


def test_augmentations_are_named():
    x = small_arrays(count=50).train_x.float()

    def made(how):
        return loader.augmented(x, torch.Generator().manual_seed(1), how)

    assert torch.equal(made(False), x)
    assert torch.equal(made(True), made("crop+flip"))
    assert torch.equal(made("flip+crop"), loader.crop_and_flip(x, torch.Generator().manual_seed(1)))
    flipped = made("flip")
    same, mirrored = (flipped == x).flatten(1).all(1), (flipped == x.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all() and same.any() and mirrored.any()
    assert torch.equal(made("cutout"), loader.cutout(x, torch.Generator().manual_seed(1)))
    with pytest.raises(ValueError, match=r"augment must join some of crop, flip, cutout by '\+'; got 'rotate'"):
        made("crop+rotate")
