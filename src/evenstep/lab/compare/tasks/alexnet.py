"""A net in AlexNet's proportions on Tiny-ImageNet at 32x32 pixels."""

from functools import partial

from evenstep.lab.models import alexnet

from .images import ImageTask

build = partial(alexnet, classes=200)

TASKS = {
    "alexnet": ImageTask(
        build,
        steps=3 * 703,
        batch=128,
        small=partial(build, width=4),
        normalized=partial(build, batch_norm=True),
        kind="folder",
    )
}
