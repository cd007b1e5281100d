"""What all recommenders share, how a model of one's own is found by its name, and a model without its numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fairfold.errors import InvalidSettings
from fairfold.kernels.form import Form


class Recommender(nn.Module):
    """A module with tables of users and of items, whose rows ``combine`` turns into scores.

    Your own model makes its tensors in ``__init__(num_users, num_items, factors)`` and defines :meth:`combine`. The
    names say which tensors belong to whom. A child whose name begins with ``user`` is an ``nn.Embedding`` with a row
    per user, which is not sent. One whose name begins with ``item`` has a row per item, and devices hold it
    compressed. All other parameters are dense: devices hold them whole, unless told to compress everything. In a
    federation dropout has no effect.

    Args:
        num_users: Number of users.
        num_items: Size of the catalogue.

    Example:
        >>> class Dot(Recommender):
        ...     def __init__(self, num_users, num_items, factors):
        ...         super().__init__(num_users, num_items)
        ...         self.user = nn.Embedding(num_users, factors)
        ...         self.item = nn.Embedding(num_items, factors)
        ...
        ...     def combine(self, users, items):
        ...         return (users[0] * items[0]).sum(-1)
        >>> Dot(10, 50, 8)(torch.tensor([3]), torch.tensor([1, 2, 3])).shape
        torch.Size([3])
    """

    def __init__(self, num_users: int, num_items: int) -> None:
        super().__init__()
        self.num_users, self.num_items = num_users, num_items

    @property
    def form(self) -> Form | None:
        """What its scores are made of, for training in one native call; None where that does not know the model."""
        return None

    def embed_users(self, users: Tensor) -> tuple[Tensor, ...]:
        """What the model holds of some users: a row of each of their tables, in the order these were made."""
        return tuple(table(users) for name, table in self.named_children() if name.startswith("user"))

    def embed_items(self, items: Tensor) -> tuple[Tensor, ...]:
        """What the model holds of some items."""
        return tuple(table(items) for name, table in self.named_children() if name.startswith("item"))

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        """Scores of embedded users with embedded items: their last dimension goes, the others may broadcast."""
        raise NotImplementedError

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores of pairs, of the shape that ``users`` and ``items`` broadcast to."""
        return self.combine(self.embed_users(users), self.embed_items(items))

    def score_block(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores of every user with every item, [users, items]."""
        return self(users[:, None], items)  # type: ignore[no-any-return]


def make_named(name: str, num_users: int, num_items: int, factors: int) -> Recommender:
    """A model of one's own, named ``package.module:Class``; refused where it is not as :class:`Recommender` says."""
    model = _found(name)(num_users, num_items, factors)  # type: ignore[call-arg]
    problems = [
        f"{child} is not an nn.Embedding with a row {side}"
        for side, rows in (("user", num_users), ("item", num_items))
        for child, table in model.named_children()
        if child.startswith(side) and not (isinstance(table, nn.Embedding) and table.num_embeddings == rows)
    ]
    named, tables = [child for child, _ in model.named_children()], ("user", "item")
    problems += [f"no table named {side}..." for side in tables if not any(child.startswith(side) for child in named)]
    problems += [f"{own} is no table" for own, _ in model.named_parameters(recurse=False) if own.startswith(tables)]
    # Whatever is neither sent nor kept would differ from device to device without anybody's knowing.
    problems += [f"{buffer} is a buffer" for buffer, _ in model.named_buffers()]
    if problems:
        needed = "tables user... and item..., parameters for all else, no buffers"
        raise InvalidSettings(f"model={name!r}: {'; '.join(problems)}", needed, "See fairfold.models.Recommender.")
    return model


def _found(name: str) -> type[Recommender]:
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        needed = "'package.module:Class', which Python can import"
        raise InvalidSettings(f"model={name!r}: {error}", needed, "Install it, or correct the name.") from None
    if not (isinstance(kind, type) and issubclass(kind, Recommender)):
        raise InvalidSettings(f"model={name!r}", "a subclass of fairfold.models.Recommender", "Derive it from that.")
    return kind


@contextmanager
def outline() -> Iterator[None]:
    """Modules made in here have shapes and no numbers: no memory is taken, nothing is drawn."""
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """Leaves out first values: torch would import its compiler, which takes seconds, to draw none."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == torch.nn.init.__name__:
            return args[0] if args else given["tensor"]
        return func(*args, **given)
