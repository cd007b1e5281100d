"""``fairfold central``: train with all data in one place, beside the reference rows."""

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairfold.cli.errors import told_plainly
from fairfold.errors import InvalidSettings

if TYPE_CHECKING:
    import torch

    from fairfold.data.interactions import Dataset, Interactions
    from fairfold.models import Recommender
    from fairfold.models.tasks import Task


class Model(StrEnum):
    """Models that can be trained centrally."""

    MF = "mf"
    NEUMF = "neumf"
    NEUMF_MLP = "neumf-mlp"


# The paper's.
FACTORS = {Model.MF: 8, Model.NEUMF: 8, Model.NEUMF_MLP: 32}
# Chosen on held-out parts of goodreads-100 (the paper has 1) and of goodreads-interactions-200k's ratings.
NEGATIVES, WEIGHT_DECAY = 4, 1e-3


def central(
    data: Annotated[str, typer.Option(help="A known name, a folder, a file, or 'synthetic'.")] = "synthetic",
    model: Annotated[Model, typer.Option(help="mf, neumf: rankings; neumf-mlp: ratings.")] = Model.NEUMF,
    epochs: Annotated[int, typer.Option(help="At most this many passes over the training set.")] = 30,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    batch_size: Annotated[
        int | None, typer.Option(help="Positives, or ratings, a step; about 100 steps an epoch if not given.")
    ] = None,
    factors: Annotated[int | None, typer.Option(help="Length of the embedding vectors.")] = None,
    negatives: Annotated[int, typer.Option(help="Negatives for each positive (rankings).")] = NEGATIVES,
    regulariser: Annotated[float, typer.Option(help="Weight of the embeddings' norm (rankings).")] = 1e-6,
    weight_decay: Annotated[float, typer.Option(help="Adam's penalty on weights (ratings).")] = WEIGHT_DECAY,
    dropout: Annotated[float, typer.Option(help="Dropout in NeuMF's network.")] = 0.0,
    valid_share: Annotated[
        float, typer.Option(help="Held out of training to choose the number of epochs; 0: train them all.")
    ] = 0.1,
    patience: Annotated[int, typer.Option(help="Epochs to wait for a better validation value.")] = 10,
    k: Annotated[int, typer.Option(help="Ranks that count (rankings).")] = 20,
    top_users: Annotated[int | None, typer.Option(help="Only the users with most interactions.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything drawn by chance.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps …")] = "auto",
    references: Annotated[bool, typer.Option(help="Compute the reference rows.")] = True,
) -> None:
    """Train a model with all data in one place, and print its metrics beside simple reference methods.

    The number of epochs is chosen on a part held out of the training set. Then the model is trained anew on the
    whole training set for so many epochs, and evaluated on the test set after each.
    """
    from rich.console import Console

    from fairfold.cli import central_output as output
    from fairfold.models.central import CentralSettings
    from fairfold.models.tasks import RankingTask, RatingTask

    console = Console()
    with told_plainly():
        settings = CentralSettings(
            epochs=epochs,
            learning_rate=lr,
            batch_size=1 if batch_size is None else batch_size,
            negatives=negatives,
            regulariser=regulariser,
            weight_decay=weight_decay,
            seed=seed,
        )
        place = choose_device(device)
        ratings = model is Model.NEUMF_MLP
        loaded = load_data(data, ratings=ratings, top_users=top_users, seed=seed)
        task: Task = RatingTask(loaded) if ratings else RankingTask(loaded, k)
        if batch_size is None:
            settings = replace(settings, batch_size=default_batch_size(len(task.train)))
        width = FACTORS[model] if factors is None else factors

        def make() -> "Recommender":
            return make_model(model, task.train, width, dropout, seed).to(place)

        output.describe(console, loaded, task, place)
        parts = validation_parts(loaded, task, valid_share, seed)
        if parts is not None:
            best = output.chosen_epochs(console, task, make(), parts, settings, patience)
            settings = replace(settings, epochs=best)
        rows = output.reference_rows(console, task) if references else []
        rows += output.model_rows(console, task, make(), settings, model.value)
        output.print_table(console, task, rows)


def default_batch_size(samples: int) -> int:
    """About 100 steps an epoch; at most 4096 samples, since larger steps need another learning rate."""
    return min(4096, max(64, samples // 100))


def choose_device(name: str) -> "torch.device":
    """The device by its name; auto is the GPU where there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidSettings(f"device = {name} ({reason})", "a device of this machine", "Try auto or cpu.") from None
    return device


def load_data(source: str, *, ratings: bool, top_users: int | None, seed: int) -> "Dataset":
    """The data set by name or path, or the synthetic world."""
    from fairfold.data.synthetic import SyntheticWorld

    if source == "synthetic":
        if ratings or top_users is not None:
            raise InvalidSettings(
                "ratings or top users of the synthetic world", "its interactions", "Name another data set."
            )
        return SyntheticWorld(seed=seed).dataset()
    from fairfold.data import load

    options: dict[str, Any] = {}
    if ratings:
        options["ratings"] = True
    if top_users is not None:
        options["top_users"] = top_users
    return load(source, **options)


def make_model(model: Model, train: "Interactions", factors: int, dropout: float, seed: int) -> "Recommender":
    """A fresh model; the same seed gives the same weights."""
    import torch

    from fairfold.models import MF, NeuMF, NeuMFMLP

    if factors < 1:
        raise InvalidSettings(f"factors = {factors}", "at least 1", "The paper uses 8.")
    if not 0 <= dropout < 1:
        raise InvalidSettings(f"dropout = {dropout}", "from 0 to below 1", "The paper uses 0.")
    torch.manual_seed(seed)
    if model is Model.MF:
        return MF(train.num_users, train.num_items, factors)
    if model is Model.NEUMF:
        return NeuMF(train.num_users, train.num_items, factors, dropout=dropout)
    mean = 0.0 if train.ratings is None else float(train.ratings.mean())
    return NeuMFMLP(train.num_users, train.num_items, factors, start=mean)


def validation_parts(
    data: "Dataset", task: "Task", share: float, seed: int
) -> "tuple[Interactions, Interactions] | None":
    """What to train on and what to choose on: the publisher's validation set, else a share held out."""
    from fairfold.data.holdout import hold_out

    if share == 0:
        return None
    if data.valid is not None and len(data.valid):
        return data.train, data.valid
    return hold_out(task.train, share, seed)
