"""VGG-11 without batch norm, for 32x32 images."""

from functools import partial

from evenstep.lab.models import vgg11

from .images import ImageTask

TASKS = {
    "vgg": ImageTask(
        vgg11,
        steps=5 * 351,
        batch=128,
        small=partial(vgg11, width=4),
        normalized=partial(vgg11, batch_norm=True),
        seen="a net like it",
    )
}
