"""The base class of recommenders, custom models by name, scores and ratings from a model, and losses of samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fairfold.errors import InvalidSettings
from fairfold.kernels.training import ModelForm
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.rating import Predictor


class Recommender(nn.Module):
    """A module with tables of users and of items, whose rows ``combine`` turns into scores.

    A custom model makes its tensors in ``__init__(num_users, num_items, factors)`` and defines :meth:`combine`. A child
    whose name begins with ``user`` is an ``nn.Embedding`` with a row per user, which is not sent. One whose name begins
    with ``item`` has a row per item, and clients hold it compressed. All other parameters are dense: clients hold them
    whole, unless everything is to be compressed. In a federation dropout has no effect.

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
    def form(self) -> ModelForm | None:
        """The form of the scores, for native training; None where that does not know the model."""
        return None

    def embed_users(self, users: Tensor) -> tuple[Tensor, ...]:
        """Rows of some users, one tensor per user table, in the order in which these were made."""
        return tuple(table(users) for name, table in self.named_children() if name.startswith("user"))

    def embed_items(self, items: Tensor) -> tuple[Tensor, ...]:
        """Rows of some items, one tensor per item table."""
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


def load_recommender(name: str, num_users: int, num_items: int, factors: int) -> Recommender:
    """Make the custom model ``package.module:Class``; refuse one that is not as :class:`Recommender` says."""
    model = _import_recommender(name)(num_users, num_items, factors)  # type: ignore[call-arg]
    problems = [
        f"{child} is not an nn.Embedding with a row {side}"
        for side, rows in (("user", num_users), ("item", num_items))
        for child, table in model.named_children()
        if child.startswith(side) and not (isinstance(table, nn.Embedding) and table.num_embeddings == rows)
    ]
    named, tables = [child for child, _ in model.named_children()], ("user", "item")
    problems += [f"no table named {side}..." for side in tables if not any(child.startswith(side) for child in named)]
    problems += [f"{own} is no table" for own, _ in model.named_parameters(recurse=False) if own.startswith(tables)]
    # Buffers are neither sent nor stored, and would differ from client to client.
    problems += [f"{buffer} is a buffer" for buffer, _ in model.named_buffers()]
    if problems:
        needed = "tables user... and item..., parameters for all else, no buffers"
        raise InvalidSettings(f"model={name!r}: {'; '.join(problems)}", needed, "See fairfold.models.Recommender.")
    return model


def _import_recommender(name: str) -> type[Recommender]:
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
def shapes_only() -> Iterator[None]:
    """Make modules with shapes and no values: no memory is allocated, nothing is drawn."""
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """Skips initialization: torch would import its compiler, which takes seconds, to draw nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == torch.nn.init.__name__:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


# Pairs of user and item scored at a time: a model holds a few dozen floats for each of them. On a CPU scores and what
# is added to them stay in its cache; a GPU would rather be asked less often.
BLOCK_PAIRS, TIMES_ON_GPU = 1 << 18, 4


def scorer(model: nn.Module) -> Scorer:
    """A function from user ids to their scores of all items, made block by block in evaluation mode."""
    if not isinstance(model, Recommender):
        given = f"{type(model).__name__}, which cannot rank a catalogue"
        raise InvalidSettings(given, "a fairfold.models.Recommender", "Use MF or NeuMF, or derive your model from it.")

    def score(users: Tensor) -> Tensor:
        with _evaluating(model) as device:
            users = users.to(device)
            pairs = BLOCK_PAIRS if users.is_cpu else BLOCK_PAIRS * TIMES_ON_GPU
            step = max(1, pairs // max(1, len(users)))
            scores = torch.empty(len(users), model.num_items, device=device)
            for start in range(0, model.num_items, step):
                items = torch.arange(start, min(start + step, model.num_items), device=device)
                scores[:, start : start + step] = model.score_block(users, items)
            return scores

    return score


def predictor(model: nn.Module) -> Predictor:
    """A function from users and items to the model's ratings, without gradients and in evaluation mode."""

    def predict(users: Tensor, items: Tensor) -> Tensor:
        with _evaluating(model) as device:
            ratings: Tensor = model(users.to(device), items.to(device))
            return ratings

    return predict


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Switch off gradients and training mode within a block; gives the model's device."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


def sampled_bpr(scores: Tensor) -> Tensor:
    """Bayesian personalised ranking (Rendle et al. 2009): mean of -log σ(first - drawn) of [samples, 1 + drawn]."""
    return -functional.logsigmoid(scores[:, :1] - scores[:, 1:]).mean(1)


def sampled_softmax(scores: Tensor) -> Tensor:
    """-log of the probability that the first item of [samples, 1 + drawn] is the one chosen among them.

    Items are drawn with equal chance, so log Q is a constant that a softmax does not see: nothing has to be corrected,
    however few are drawn. With one of them this is BPR.
    """
    return torch.logsumexp(scores, 1) - scores[:, 0]


def sampled_squares(scores: Tensor, weight: Tensor) -> Tensor:
    """Half the squared error: 1 is wanted for the first item of [samples, 1 + drawn], 0 for the others.

    A user with c of n items has c samples, with m drawn each from the n - c others. With a weight of w·(n - c) / (c·m)
    the sum over the samples is in expectation half of Σ⁺ (1 - s)² + w·Σ⁻ s², over all n items.
    """
    return 0.5 * ((1 - scores[:, 0]).square() + weight * scores[:, 1:].square().sum(1))
