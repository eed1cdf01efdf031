"""The CNN of the paper's figure 2: five layers, PyTorch's first weights, no augmentation."""

from functools import partial

from evenstep.lab.models import paper_cnn

from .images import ImageTask

TASKS = {
    "cnn": ImageTask(
        paper_cnn,
        steps=6 * 703,
        batch=64,
        small=paper_cnn,
        augment=False,
        normalized=partial(paper_cnn, batch_norm=True),
        seen="this network",
    )
}
