"""A fingerprint of a data set, by which runs and cached baselines recognize the data they belong to."""

import hashlib
from typing import Any

from fairfold.data.images import ImageDataset
from fairfold.data.interactions import Dataset


def data_fingerprint(data: Dataset | ImageDataset) -> dict[str, Any]:
    """Name, counts and SHA-256 of the training and test data."""
    if isinstance(data, ImageDataset):
        counts = data.counts()
        tensors = [tensor for part in (data.train, data.test) for tensor in (part.images, part.labels, part.writers)]
    else:
        counts = {"users": data.num_users, "items": data.num_items, "interactions": len(data.train)}
        tensors = [tensor for part in (data.train, data.test) for tensor in (part.offsets, part.items, part.ratings)]
    checksum = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            checksum.update(tensor.contiguous().numpy().data)
    return {"name": data.name, **counts, "sha256": checksum.hexdigest()}
