"""Images as a federation: a device holds some of them and trains a network that reads them.

All tensors of the network are *dense* in the sense of :mod:`fairfold.federation.task`: used whole at every step. There
are no tables, and no vectors of a user's own.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fairfold.data.clients import Clients, by_label, by_writer
from fairfold.data.images import ImageDataset
from fairfold.data.interactions import Dataset
from fairfold.errors import InvalidSettings
from fairfold.federation.outline import outline
from fairfold.federation.settings import Settings
from fairfold.federation.storage import Storage
from fairfold.federation.task import SMALLEST_COMPRESSED, Batch, Shapes, Task, Weights
from fairfold.models import MLP, LeNet

WHOLE_MODEL = "model"
"""Name of the one vector that stands for all tensors, where they are compressed as one."""


def task_of(data: Dataset | ImageDataset, settings: Settings) -> Task:
    """What devices train, by the kind of the data; refused where the model is of the other kind."""
    if isinstance(data, ImageDataset):
        return ImageTask(data, settings)
    if settings.reads_images:
        raise InvalidSettings(
            f"model={settings.model!r} on {data.name!r}, which holds interactions", "images", "Use e.g. --data mnist."
        )
    return Task(data, settings)


class ImageTask(Task):
    """One network and one set of images, as a federation of devices.

    Attributes:
        images: The data.
        clients: Which training images each device holds.
        layers: Name and shape of every tensor of the network, however the federation sees them.
    """

    def __init__(self, data: ImageDataset, settings: Settings) -> None:
        if not settings.reads_images:
            raise InvalidSettings(
                f"model={settings.model!r} on {data.name!r}, which holds images",
                "a model of images",
                "Use --model mlp or lenet.",
            )
        self.images = data
        self.settings = settings
        self.ratings = False
        self.clients = _divided(data, settings)
        self.num_clients = len(self.clients)
        self.network = self.empty_network()
        self.layers: Shapes = {name: tuple(tensor.shape) for name, tensor in self.network.named_parameters()}
        self.own, self.tables, self.user_tables = {}, {}, {}
        size = sum(prod(shape) for shape in self.layers.values())
        self.dense = {WHOLE_MODEL: (size,)} if settings.compress == "model" else self.layers

    def empty_network(self) -> nn.Module:
        """The architecture alone, without memory for its tensors."""
        with outline():
            return _make(self.images, self.settings)

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:  # noqa: ARG002
        """Tensors before training; devices have none of their own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            network = _make(self.images, self.settings)
        layers = {name: tensor.detach().reshape(-1) for name, tensor in network.named_parameters()}
        return {WHOLE_MODEL: torch.cat(list(layers.values()))} if WHOLE_MODEL in self.dense else layers, {}

    @property
    def compressed(self) -> Shapes:
        """What a device holds compressed: everything but small tensors. FedHM and HeteroFL see to all of them."""
        if self.settings.method in ("fedhm", "heterofl"):
            return self.shapes
        return {name: shape for name, shape in self.shapes.items() if prod(shape) >= SMALLEST_COMPRESSED}

    def samples(self, client: int) -> int:
        """How many images a device holds."""
        return int(self.clients.offsets[client + 1] - self.clients.offsets[client])

    def batches(self, client: int, generator: torch.Generator) -> list[Batch]:
        """All batches of a device's round, epoch after epoch: numbers of images, and their labels."""
        return [
            Batch(part, self.images.train.labels[part])
            for order in self.orders(client, generator)
            for part in torch.split(order, self.settings.batch_size)
        ]

    def orders(self, client: int, generator: torch.Generator) -> list[Tensor]:
        """A device's images in the order in which each epoch takes them."""
        rows = self.clients.of(client)
        if not self.settings.shuffle:
            return [rows] * self.settings.local_epochs
        return [rows[torch.randperm(len(rows), generator=generator)] for _ in range(self.settings.local_epochs)]

    def losses(self, batch: Batch, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor]) -> Tensor:  # noqa: ARG002
        """The cross-entropy of every image of a batch."""
        assert batch.targets is not None
        return self.image_losses(dense, self.pixels(batch.items), batch.targets)

    def pixels(self, rows: Tensor) -> Tensor:
        """Training images as the network takes them."""
        return self.as_input(self.images.train.images[rows])

    def as_input(self, images: Tensor) -> Tensor:
        """Grey values as the network takes them: from 0 to 1, less the mean, over the deviation."""
        chosen = self.settings.images
        return images.to(torch.get_default_dtype()).div_(255).sub_(chosen.mean).div_(chosen.deviation)

    def image_losses(self, dense: Weights, pixels: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of every image, by a network of the given tensors."""
        logits: Tensor = functional_call(self.network, self.tensors(dense), (pixels,))
        return functional.cross_entropy(logits, labels, reduction="none")

    def tensors(self, shared: Weights) -> Weights:
        """The network's tensors in their shapes, from flat vectors: one a tensor, or one for all."""
        if WHOLE_MODEL in self.dense:
            parts = torch.split(shared[WHOLE_MODEL], [prod(shape) for shape in self.layers.values()])
            shared = dict(zip(self.layers, parts, strict=True))
        return {name: shared[name].view(shape) for name, shape in self.layers.items()}

    def model_of(self, shared: Weights, own: Weights) -> nn.Module:  # noqa: ARG002
        """The network with the given tensors."""
        network = self.empty_network()
        network.load_state_dict(self.tensors(shared), assign=True)
        return network


def _divided(data: ImageDataset, settings: Settings) -> Clients:
    chosen = settings.images
    if chosen.split == "dirichlet":
        seed = settings.seed if chosen.seed is None else chosen.seed
        return by_label(data.train.labels, chosen.devices, chosen.concentration, seed).without_empty()
    if data.train.writers is None:
        raise InvalidSettings(
            f"images.split='writer' on {data.name!r}, which does not name its writers",
            "the writer of every image",
            "Use --data qmnist-writers or femnist, or split='dirichlet'.",
        )
    return by_writer(data.train.writers).without_empty()


def _make(data: ImageDataset, settings: Settings) -> nn.Module:
    height, width = data.train.images.shape[1:]
    if settings.model == "mlp":
        return MLP(height * width, classes=data.num_classes)
    if (height, width) != (28, 28):
        raise InvalidSettings(f"model='lenet' on images of {height} × {width}", "28 × 28", "Use model='mlp'.")
    return LeNet(data.num_classes)
