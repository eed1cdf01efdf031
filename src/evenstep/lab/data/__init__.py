"""Data sets as tensors in memory, read without torchvision; `load` finds out by looking what a path holds."""

from .arrays import Arrays, Text
from .cifar import CIFAR_CLASSES, cifar10
from .fashion import FASHION_CLASSES, FASHION_FILE, fashion_mnist, fashion_mnist_subset
from .feeding import augmented, batches, crop_and_flip, cutout, sent
from .folder import image_folder
from .loading import NAMES, find, load
from .text import text_file

__all__ = [
    "CIFAR_CLASSES",
    "FASHION_CLASSES",
    "FASHION_FILE",
    "NAMES",
    "Arrays",
    "Text",
    "augmented",
    "batches",
    "cifar10",
    "crop_and_flip",
    "cutout",
    "fashion_mnist",
    "fashion_mnist_subset",
    "find",
    "image_folder",
    "load",
    "sent",
    "text_file",
]
