"""A compressed network of embedding, convolutions and linear layers learns to read digits; its file is a quarter."""

import gzip
import os
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fairfold import compress
from fairfold.nn import FairConv2d, FairEmbedding, FairLinear

DATA = Path(os.environ.get("FAIRFOLD_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "mnist"
needs_mnist = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no MNIST files in {DATA.name}/ of the data folder (set FAIRFOLD_DATA)"
)


def read_idx(name: str) -> Tensor:
    """One of the published files: a header that ends with the sizes, then bytes."""
    raw = gzip.decompress((DATA / f"{name}-ubyte.gz").read_bytes())
    dimensions = raw[3]
    sizes = numpy.frombuffer(raw, ">i4", dimensions, 4).tolist()
    return torch.from_numpy(numpy.frombuffer(raw, numpy.uint8, offset=4 + 4 * dimensions).reshape(sizes).copy())


def words(images: Tensor) -> Tensor:
    """Every 2 × 2 patch as one of 256 words, four grey levels a pixel: what the embedding is for."""
    levels = (images // 64).long()
    return levels[:, ::2, ::2] + 4 * levels[:, 1::2, ::2] + 16 * levels[:, ::2, 1::2] + 64 * levels[:, 1::2, 1::2]


class Reader(nn.Module):
    """Words of patches, two convolutions, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(256, 16)
        self.first = nn.Conv2d(16, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(576, 128)
        self.digits = nn.Linear(128, 10)

    def forward(self, ids: Tensor) -> Tensor:
        features = self.words(ids).permute(0, 3, 1, 2)
        features = F.max_pool2d(F.relu(self.first(features)), 2)
        features = F.max_pool2d(F.relu(self.second(features)), 2)
        result: Tensor = self.digits(F.relu(self.hidden(features.flatten(1))))
        return result


def accuracy_after_training(model: nn.Module, examples: int, epochs: int) -> float:
    ids, labels = words(read_idx("train-images-idx3")[:examples]), read_idx("train-labels-idx1")[:examples].long()
    steps = epochs * -(-examples // 128)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(examples), 128):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids[batch]), labels[batch])
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    test_ids, test_labels = words(read_idx("t10k-images-idx3")), read_idx("t10k-labels-idx1")
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(1) for part in torch.split(test_ids, 1000)])
    return float((predicted == test_labels).float().mean())


def compressed(shared: bool) -> nn.Module:
    torch.manual_seed(0)
    return compress(Reader(), "4x", shared=shared)


@needs_mnist
def test_a_compressed_network_learns() -> None:
    assert accuracy_after_training(compressed(shared=False), examples=12_800, epochs=1) >= 0.85


@needs_mnist
@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_compressed_network_reads_digits(shared: bool) -> None:
    assert accuracy_after_training(compressed(shared), examples=60_000, epochs=2) >= 0.97


@pytest.mark.parametrize("shared", [False, True])
def test_its_file_is_a_quarter(shared: bool, tmp_path: Path) -> None:
    twin = compressed(shared)
    kinds = {type(layer) for layer in twin.modules()}
    assert {FairEmbedding, FairConv2d, FairLinear} <= kinds
    assert not kinds & {nn.Embedding, nn.Conv2d, nn.Linear}
    sizes = {}
    for name, model in (("full", Reader()), ("compact", twin)):
        safetensors.torch.save_file(model.state_dict(), tmp_path / name)
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
        sizes[name] = (tmp_path / name).stat().st_size, (tmp_path / f"{name}.pt").stat().st_size
    # Half a kilobyte an entry of torch's archive shows in a model as small as this one.
    for full, compact, tolerance in zip(sizes["full"], sizes["compact"], (0.05, 0.07), strict=True):
        assert compact / full == pytest.approx(0.25, rel=tolerance)
