"""Small images for tests: every class has a pattern of its own, under noise."""

from typing import Any

import torch

from fairfold.data.images import ImageDataset, Images

SMALL: dict[str, Any] = {
    "model": "mlp",
    "capacities": "2x-4x",
    "data": {"name": "pictures", "clients": 5},
    "clients_per_round": 3,
    "local_epochs": 2,
    "batch_size": 16,
    "rounds": 3,
    "evaluate_every": 1,
}


def pictures(seed: int = 0, count: int = 120, classes: int = 4, side: int = 6, writers: int = 7) -> ImageDataset:
    """Two thirds to train on, one third to test on."""
    source = torch.Generator().manual_seed(seed)
    patterns = torch.rand(classes, side, side, generator=source)
    labels = torch.arange(count) % classes
    noise = torch.rand(count, side, side, generator=source)
    images = (255 * (0.7 * patterns[labels] + 0.3 * noise)).to(torch.uint8)
    by = torch.randint(writers, (count,), generator=source)
    cut = count * 2 // 3
    return ImageDataset(
        "pictures",
        Images(images[:cut], labels[:cut], by[:cut]),
        Images(images[cut:], labels[cut:], by[cut:]),
        classes,
        [str(number) for number in range(writers)],
    )
