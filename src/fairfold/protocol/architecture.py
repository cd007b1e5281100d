"""A model's tensors as the federation sees them, with nobody's data.

They are of three kinds. *Tables* have a row per item; a device looks rows up. *Dense* tensors are used whole. A user's
*own* vectors belong to one client; they are not sent, which does not keep them secret (docs/privacy.md), or are rows of
tables that are sent along.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fairfold.errors import InvalidSettings
from fairfold.kernels.form import Form
from fairfold.methods import Tensors
from fairfold.models import MF, MLP, LeNet, NeuMF, NeuMFMLP, Recommender
from fairfold.models.recommender import make_named, outline
from fairfold.protocol.plugins import registered
from fairfold.protocol.storage import Storage, TablesPlaced
from fairfold.values import Shapes, Weights

if TYPE_CHECKING:
    from fairfold.settings import Settings

ITEM_BIAS = "item_bias.weight"
"""Name of the table of one column that ``item_bias`` asks for: no device holds it compressed."""

WHOLE_MODEL = "model"
"""Name of the one vector that stands for all tensors of a network, where they are compressed as one."""

Picture = tuple[int, int, int]
"""Height and width of images, and how many classes they have."""

SPREAD = 0.1
"""Standard deviation of matrix factorisation's tables before training."""


class _Combine(nn.Module):
    """A model's part behind the lookups, in a form that can be called with other weights."""

    def __init__(self, model: Recommender) -> None:
        super().__init__()
        self.model = model

    def forward(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        return self.model.combine(users, items)


class Architecture:
    """A recommender's tensors for a catalogue.

    Attributes:
        tables: Name and shape of every item table.
        dense: Name and shape of every other tensor that is averaged.
        user_tables: Name and shape of the users' tables where these are sent and averaged; else empty.
        own: Name and length of every vector a user has.
        form: What the model's scores are made of, for training in one call; None for other models.
        network: The architecture alone, where the model is a network of images.
    """

    form: Form | None = None
    network: nn.Module | None = None

    def __init__(self, settings: "Settings", items: int, users: int) -> None:
        self._settings, self.items, self.users = settings, items, users
        with outline():  # the architecture alone: its tensors are never made on a device
            model = self._make()
        # No dropout: all that chance decides of a round comes from its seed.
        self._combine, self.form = _Combine(model).eval(), model.form
        shapes = {name: tuple(tensor.shape) for name, tensor in self._combine.model.named_parameters()}
        self.own = {name: shape[1] for name, shape in shapes.items() if _is_table(name, "user")}
        self.tables: Shapes = {name: shape for name, shape in shapes.items() if _is_table(name, "item")}
        self._model_dense = {n: shape for n, shape in shapes.items() if n not in self.own and n not in self.tables}
        self.dense: Shapes = self._model_dense | settings.algorithm.extra(settings)
        uploaded = getattr(settings.algorithm, "user_vectors", "private") == "uploaded"
        self.user_tables: Shapes = {name: shapes[name] for name in self.own} if uploaded else {}

    def _make(self) -> Recommender:
        chosen = self._settings.model
        if chosen.kind == "mf":
            return MF(self.users, self.items, chosen.factors, spread=SPREAD, item_bias=chosen.item_bias)
        kinds: dict[str, Any] = {"neumf": NeuMF, "neumf-mlp": NeuMFMLP} | registered("model")
        make = kinds.get(chosen.kind) or partial(make_named, chosen.kind)
        model: Recommender = make(self.users, self.items, chosen.factors)
        return model

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:
        """Tensors before training: those of the server, flat, and those of the users, a row each, in ``storage``."""
        chosen = int(torch.randint(2**62, (), generator=generator))
        placed = nullcontext() if storage is None else TablesPlaced(storage, self.users)
        with torch.random.fork_rng(devices=[]), placed:
            torch.manual_seed(chosen)
            model = self._make()
        everything = {name: tensor.detach() for name, tensor in model.named_parameters()}
        everything |= {name: torch.zeros(shape) for name, shape in self.dense.items() if name not in everything}
        # A copy where there are as many items as users, and an item table has been placed as well.
        in_memory = storage is None or self.items != self.users
        shared = {name: everything[name].reshape(-1) for name in self.shapes}
        shared = shared if in_memory else {name: tensor.clone() for name, tensor in shared.items()}
        return shared, {} if self.user_tables else {name: everything[name] for name in self.own}

    @property
    def shapes(self) -> Shapes:
        """Name and shape of everything the server holds."""
        return self.tables | self.dense | self.user_tables

    @property
    def tensors(self) -> Tensors:
        """The same as a method sees it."""
        beside = {name: shape for name, shape in self.tables.items() if name == ITEM_BIAS}
        tables = {name: shape for name, shape in self.tables.items() if name not in beside}
        reads: dict[str, tuple[str, int]] = {}
        if self.form is not None and self.form.output:
            names, dense = list(self.tables), list(self.dense)
            if self.form.layers:
                reads[dense[0]] = (names[-1], self.form.user)
            if self.form.product:
                reads[dense[-2]] = (names[0], 0)
        whole_rows = self._settings.algorithm.whole_rows
        return Tensors(tables, self.dense | self.user_tables, beside, reads, whole_rows=whole_rows)

    def scores(self, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor]) -> Tensor:
        """Scores of looked-up users with looked-up items; their shapes may broadcast."""
        weights = {f"model.{name}": dense[name].view(shape) for name, shape in self._model_dense.items()}
        arguments: Any = (tuple(users), tuple(items))
        found: Tensor = functional_call(self._combine, weights, arguments)
        return found

    def model_of(self, shared: Weights, own: Weights) -> nn.Module:
        """The whole model, for evaluation: the server's tensors (or a device's, recovered) and every user's vectors."""
        with outline():
            model = self._make()
        extra = self.dense.keys() - self._model_dense.keys()
        state = {name: tensor.view(self.shapes[name]) for name, tensor in shared.items() if name not in extra}
        model.load_state_dict(state | {name: rows for name, rows in own.items() if name in self.own}, assign=True)
        return model


class ImageArchitecture(Architecture):
    """A network's tensors: all of them dense, used whole at every step, and no vectors of a user's own.

    Attributes:
        layers: Name and shape of every tensor of the network, however the federation sees them.
    """

    network: nn.Module

    def __init__(self, settings: "Settings", height: int, width: int, classes: int) -> None:
        self._settings, self._side, self._classes = settings, (height, width), classes
        self.items, self.users = 0, 1
        self.network = self.empty_network()
        self.layers: Shapes = {name: tuple(tensor.shape) for name, tensor in self.network.named_parameters()}
        self.own, self.tables, self.user_tables = {}, {}, {}
        size = sum(prod(shape) for shape in self.layers.values())
        one_vector = getattr(settings.subspace, "compress", "all") == "model"
        self.dense = {WHOLE_MODEL: (size,)} if one_vector else self.layers

    def empty_network(self) -> nn.Module:
        """The architecture alone, without memory for its tensors."""
        with outline():
            return self._network()

    def _network(self) -> nn.Module:
        height, width = self._side
        if self._settings.model.kind == "mlp":
            return MLP(height * width, classes=self._classes)
        if (height, width) != (28, 28):
            raise InvalidSettings(f"model='lenet' on images of {height} × {width}", "28 × 28", "Use model='mlp'.")
        return LeNet(self._classes)

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:
        """Tensors before training; devices have none of their own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            network = self._network()
        layers = {name: tensor.detach().reshape(-1) for name, tensor in network.named_parameters()}
        return {WHOLE_MODEL: torch.cat(list(layers.values()))} if WHOLE_MODEL in self.dense else layers, {}

    @property
    def tensors(self) -> Tensors:
        """See the base class."""
        return Tensors({}, self.dense, network=True)

    def in_shape(self, shared: Weights) -> Weights:
        """The network's tensors in their shapes, from flat vectors: one per tensor, or one for all."""
        if WHOLE_MODEL in self.dense:
            parts = torch.split(shared[WHOLE_MODEL], [prod(shape) for shape in self.layers.values()])
            shared = dict(zip(self.layers, parts, strict=True))
        return {name: shared[name].view(shape) for name, shape in self.layers.items()}

    def model_of(self, shared: Weights, own: Weights) -> nn.Module:
        """The network with the given tensors."""
        network = self.empty_network()
        network.load_state_dict(self.in_shape(shared), assign=True)
        return network


def architecture_of(settings: "Settings", items: int, users: int, picture: Picture | None) -> Architecture:
    """Of a recommender, or of a network for images."""
    return Architecture(settings, items, users) if picture is None else ImageArchitecture(settings, *picture)


def _is_table(name: str, side: str) -> bool:
    """Whether a tensor has a row per user, or a row per item."""
    return name.startswith(side) and name.endswith(".weight")
