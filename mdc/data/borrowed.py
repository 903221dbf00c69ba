"""What is taken from img2dataset, without what it brings along.

Importing it loads the packages of its own image writers, resizer and log, torch among them. None of these is used here,
and every process that downloads would pay for them with seconds and half a gigabyte.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

UNUSED = ("albumentations", "wandb", "webdataset")


@contextmanager
def _left_out(names: tuple[str, ...]) -> Iterator[None]:
    """Empty modules stand for packages that are not imported yet, until the end of the block."""
    missing = [name for name in names if name not in sys.modules]
    sys.modules.update({name: ModuleType(name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


with _left_out(UNUSED):
    from img2dataset import distributor, downloader
    from img2dataset.downloader import Downloader, is_disallowed

__all__ = ["Downloader", "distributor", "downloader", "is_disallowed"]
