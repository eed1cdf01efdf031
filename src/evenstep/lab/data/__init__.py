"""Data sets as tensors in memory, read without torchvision; `load` recognises the contents of a path."""

from .arrays import Arrays, Text, text_file
from .cifar import CIFAR_CLASSES, cifar10
from .fashion import FASHION_CLASSES, FASHION_FILE, fashion_mnist, fashion_mnist_subset
from .folder import image_folder
from .loading import find, load

__all__ = [
    "CIFAR_CLASSES",
    "FASHION_CLASSES",
    "FASHION_FILE",
    "Arrays",
    "Text",
    "cifar10",
    "fashion_mnist",
    "fashion_mnist_subset",
    "find",
    "image_folder",
    "load",
    "text_file",
]
