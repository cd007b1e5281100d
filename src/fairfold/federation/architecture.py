"""A model's tensors as the federation sees them, without any data, and where users' tables are stored.

*Tables* have a row per item, which clients look up. *Dense* tensors are used whole. *User vectors* belong to one client
each: they are not sent, which alone does not keep them secret (docs/privacy.md), or are rows of tables that are sent.
On one machine that simulates all clients, users' tables may lie in memory-mapped files.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fairfold import atomic_io
from fairfold.errors import CannotWrite, InvalidSettings
from fairfold.federation.algorithm import RemembersUpdates
from fairfold.federation.plugins import registered
from fairfold.kernels.training import ModelForm
from fairfold.methods import Fair, Tensors
from fairfold.models import MF, MLP, LeNet, NeuMF, NeuMFMLP, Recommender
from fairfold.models.recommender import load_recommender, shapes_only
from fairfold.subspace.table_file import TableFile
from fairfold.typing import Shapes, Weights

if TYPE_CHECKING:
    from fairfold.config import Settings


@dataclass(frozen=True)
class Storage:
    """Allocates users' tables, and the server's, in memory, in files of a folder, or by their size."""

    folder: Path | None = None
    choice: Literal["auto", "memory", "disk"] = "auto"
    files: dict[int, TableFile] = field(default_factory=dict)  # of the server's tables on disk, by their address

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a table of users, not yet filled."""
        size = prod(shape) * dtype.itemsize
        if self.folder is None or self.choice == "memory" or (self.choice == "auto" and not atomic_io.is_large(size)):
            return torch.empty(shape, dtype=dtype)
        path = atomic_io.temporary_path(self.folder / name)
        try:
            atomic_io.reserve(path, size)
            table = torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype).view(shape)
            if sys.platform != "win32":
                path.unlink()  # the file lives as long as it is mapped: a killed process leaves nothing behind
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            remedy = "Make room, name another --out, or set user_storage = 'memory'."
            raise CannotWrite(f"{path}: {reason}", f"{size:,} bytes for the users' vectors", remedy) from error
        return table

    def stored(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a table of the server on disk; in a temporary file where there is no folder."""
        path = (self.folder or Path(tempfile.gettempdir())) / f"table-{len(self.files) + 1}.blocks"
        path = atomic_io.temporary_path(path) if self.folder is None else path
        file = TableFile.create(path, prod(shape), dtype, temporary=self.folder is None)
        self.files[file.values.data_ptr()] = file
        return file.values.view(shape)


class AllocateTablesIn(TorchFunctionMode):
    """Context in which ``torch.empty`` allocates tables in a storage: of users, and of items where they go to disk."""

    def __init__(self, storage: Storage, users: int, items: int | None) -> None:
        super().__init__()
        self._storage, self._users, self._items = storage, users, items
        self._num_tables = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        first = arguments[0] if arguments else None
        if function is torch.empty and isinstance(first, tuple) and len(first) == 2:
            if first[0] == self._users:
                self._num_tables += 1
                return self._storage.empty(f"table-{self._num_tables}", first, torch.get_default_dtype())
            if first[0] == self._items:
                return self._storage.stored(first, torch.get_default_dtype())
        given = dict(options or {})
        table = given.pop("tensor", None)  # the name by which torch hands it to a mode
        file = self._storage.files.get(table.data_ptr()) if isinstance(table, Tensor) else None
        if function is nn.init.normal_ and file is not None:
            for _, block in file.blocks():  # the same numbers, few pages at a time
                nn.init.normal_(block, **given)
            return table
        return function(*arguments, **(options or {}))


ITEM_BIAS = "item_bias.weight"  # name of the one-column table of item biases, which every client holds whole
WHOLE_MODEL = "model"  # name of the vector of all tensors of a network, where they are compressed as one
ImageShape = tuple[int, int, int]  # height and width of images, and the number of their classes
SPREAD = 0.1  # standard deviation of matrix factorization's tables before training


class _Combine(nn.Module):
    """The part of a model behind its lookups, as a module for ``functional_call``."""

    def __init__(self, model: Recommender) -> None:
        super().__init__()
        self.model = model

    def forward(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        return self.model.combine(users, items)


class Architecture:
    """The tensors of a recommender for a catalogue: names and shapes of tables and of other tensors that are averaged.

    ``user_tables`` are those of users where they are sent and averaged, ``user_vectors`` lengths of a user's own.
    """

    form: ModelForm | None = None  # how scores are computed, for compiled training; None for custom models
    network: nn.Module | None = None  # the network without weights, where the model is one of images
    min_support: int = 0  # users that an item needs to have a row of its own; 0 for no limit
    max_rows: int | None = None  # rows that settings allow, where more items have the users that a row needs

    def __init__(self, settings: "Settings", items: int, users: int, *, upload_user_vectors: bool = False) -> None:
        self._settings, self.items, self.users = settings, items, users
        with shapes_only():
            model = self._make_model()
        self._combine = _Combine(model).eval()  # dropout is for training alone, see below
        self.form = model.form
        shapes = {name: tuple(tensor.shape) for name, tensor in self._combine.model.named_parameters()}
        self.user_vectors = {name: shape[1] for name, shape in shapes.items() if _is_table(name, "user")}
        self.tables: Shapes = {name: shape for name, shape in shapes.items() if _is_table(name, "item")}
        self.dense: Shapes = {
            name: shape for name, shape in shapes.items() if name not in self.user_vectors and name not in self.tables
        }
        self.user_tables: Shapes = {name: shapes[name] for name in self.user_vectors} if upload_user_vectors else {}

    def _make_model(self) -> Recommender:
        chosen = self._settings.model
        if chosen.kind == "mf":
            return MF(self.users, self.items, chosen.factors, spread=SPREAD, item_bias=chosen.item_bias)
        neumf = partial(NeuMF, depth=chosen.depth, dropout=chosen.dropout)
        kinds: dict[str, Any] = {"neumf": neumf, "neumf-mlp": NeuMFMLP} | registered("model")
        make = kinds.get(chosen.kind) or partial(load_recommender, chosen.kind)
        model: Recommender = make(self.users, self.items, chosen.factors)
        return model

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:
        """Random tensors before training: the server's, flat, and users' tables in ``storage``."""
        seed = int(torch.randint(2**62, (), generator=generator))
        on_disk = storage is not None and self._settings.run.table_storage == "disk"
        same = self.items == self.users  # then only their names distinguish tables, once they are made
        items = self.items if on_disk and not same else None
        placed = nullcontext() if storage is None else AllocateTablesIn(storage, self.users, items)
        with torch.random.fork_rng(devices=[]), placed:
            torch.manual_seed(seed)
            model = self._make_model()
        everything = {name: tensor.detach() for name, tensor in model.named_parameters()}
        shared = {name: everything[name].reshape(-1) for name in self.shapes}
        if storage is not None and same:
            shared = {name: tensor.clone() for name, tensor in shared.items()}
            for name in self.tables if on_disk else ():
                shared[name] = storage.stored(self.tables[name], shared[name].dtype).view(-1).copy_(shared[name])
        return shared, {} if self.user_tables else {name: everything[name] for name in self.user_vectors}

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor of the server."""
        return self.tables | self.dense | self.user_tables

    @property
    def tensors(self) -> Tensors:
        """All tensors as a method divides them."""
        biases = {name: shape for name, shape in self.tables.items() if name == ITEM_BIAS}
        tables = {name: shape for name, shape in self.tables.items() if name not in biases}
        readers: dict[str, tuple[str, int]] = {}
        if self.form is not None and self.form.output:
            names, dense = list(self.tables), list(self.dense)
            if self.form.layers:
                readers[dense[0]] = (names[-1], self.form.user)
            if self.form.product:
                readers[dense[-2]] = (names[0], 0)
        whole_rows = isinstance(self._settings.algorithm, RemembersUpdates)
        return Tensors(tables, self.dense | self.user_tables, biases, readers, whole_rows=whole_rows)

    def scores(self, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor]) -> Tensor:
        """Scores of looked-up users with looked-up items; their shapes may broadcast."""
        weights = {f"model.{name}": dense[name].view(shape) for name, shape in self.dense.items()}
        scores: Tensor = functional_call(self._combine, weights, (tuple(users), tuple(items)))
        return scores

    @contextmanager
    def dropout(self, generator: torch.Generator) -> Iterator[None]:
        """Drop inputs of layers inside, as the model's settings say; what is dropped follows from the generator."""
        if not self._settings.model.dropout:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            self._combine.train()
            try:
                yield
            finally:
                self._combine.eval()

    def model_of(self, shared: Weights, local_state: Weights) -> nn.Module:
        """The whole model, for evaluation: the server's tensors (or recovered ones) and every user's vectors."""
        with shapes_only():
            model = self._make_model()
        state = {name: tensor.view(self.shapes[name]) for name, tensor in shared.items()}
        state |= {name: rows for name, rows in local_state.items() if name in self.user_vectors}
        model.load_state_dict(state, assign=True)
        return model


class ImageArchitecture(Architecture):
    """The tensors of an image network: all of them dense (or one vector of all its ``layers``), and no user vectors."""

    network: nn.Module
    items, users = 0, 1

    def __init__(self, settings: "Settings", height: int, width: int, classes: int) -> None:
        self._settings = settings
        self._image_shape = height, width, classes
        self.network = self.empty_network()
        self.layers: Shapes = {name: tuple(tensor.shape) for name, tensor in self.network.named_parameters()}
        self.user_vectors, self.tables, self.user_tables = {}, {}, {}
        size = sum(prod(shape) for shape in self.layers.values())
        as_one_vector = isinstance(settings.subspace, Fair) and settings.subspace.compress == "model"
        self.dense = {WHOLE_MODEL: (size,)} if as_one_vector else self.layers

    def empty_network(self) -> nn.Module:
        """The network on the meta device, without memory for its tensors."""
        with shapes_only():
            return self._make_network()

    def _make_network(self) -> nn.Module:
        height, width, classes = self._image_shape
        if self._settings.model.kind == "mlp":
            return MLP(height * width, classes=classes)
        if (height, width) != (28, 28):
            raise InvalidSettings(f"model='lenet' on images of {height} × {width}", "28 × 28", "Use model='mlp'.")
        return LeNet(classes)

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            network = self._make_network()
        layers = {name: tensor.detach().reshape(-1) for name, tensor in network.named_parameters()}
        return {WHOLE_MODEL: torch.cat(list(layers.values()))} if WHOLE_MODEL in self.dense else layers, {}

    @property
    def tensors(self) -> Tensors:
        return Tensors({}, self.dense, network=True)

    def in_shape(self, shared: Weights) -> Weights:
        """Reshape flat vectors, one per tensor or one for all, to the network's tensors."""
        if WHOLE_MODEL in self.dense:
            parts = torch.split(shared[WHOLE_MODEL], [prod(shape) for shape in self.layers.values()])
            shared = dict(zip(self.layers, parts, strict=True))
        return {name: shared[name].view(shape) for name, shape in self.layers.items()}

    def model_of(self, shared: Weights, local_state: Weights) -> nn.Module:
        network = self.empty_network()
        network.load_state_dict(self.in_shape(shared), assign=True)
        return network


def architecture_of(settings: "Settings", items: int, users: int, image_shape: ImageShape | None) -> Architecture:
    """The architecture of a recommender, or of a network where an image shape is given."""
    return Architecture(settings, items, users) if image_shape is None else ImageArchitecture(settings, *image_shape)


def _is_table(name: str, side: str) -> bool:
    return name.startswith(side) and name.endswith(".weight")
