"""A few random images, for tests that need a data set."""

import torch

from evenstep.lab import data


def small_arrays(count=10, channels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (2, count, channels, 32, 32), generator=generator).byte()
    labels = torch.arange(count) % 10
    return data.Arrays(images[0], labels, images[1], labels, "random", data.CIFAR_CLASSES)
