"""Recommendations of a model: arrays with ids and titles, and DataFrames that other programs evaluate."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy
import torch

from fairfold.data import Interactions
from fairfold.errors import InvalidSettings
from fairfold.federation.algorithm import CompactScoring
from fairfold.federation.plan import StreamsRows
from fairfold.metrics.ranking import recommend
from fairfold.metrics.ranking_baselines import Popularity
from fairfold.runs.device_model import device_model
from fairfold.runs.loaded import item_name
from fairfold.subspace.projection import Assignment

if TYPE_CHECKING:
    from torch import Tensor

    from fairfold.data import Dataset
    from fairfold.metrics.ranking import Scorer
    from fairfold.runs.loaded import LoadedRun
    from fairfold.subspace import Capacity


@dataclass(frozen=True)
class TopItems:
    """The best items of some users.

    Attributes:
        items: Their numbers, [users, k]; -1 where there are no more.
        scores: Their scores, [users, k].
        history_sizes: How many items each user has, which are left out.
        num_informative: How many of these the model can use.
        is_fallback: Whether the model can use none: items are in the order of popularity.
    """

    items: Tensor
    scores: Tensor
    history_sizes: list[int]
    num_informative: list[int]
    is_fallback: bool


def top_items(
    run: LoadedRun, users: list[int], top: int, *, new: Interactions | None = None, capacity: Capacity | None = None
) -> TopItems:
    """The best items of users, or of ``new`` ones by their histories, by the model of the server or of a device."""
    data = run.interactions
    device = None if capacity is None else device_model(run, capacity)
    held = None if device is None else [Assignment(device.projections)]
    past = data.train if new is None else new
    histories = [past.of(user) for user in users]
    informative = [int(run.informative_items(items, held).sum()) for items in histories]
    fallback = not any(informative) and not run.settings.predicts_ratings
    if fallback:
        score: Scorer = Popularity(data.train)
    elif device is None:
        score = run.scorer(run.progress.state.full, held, new)
    else:
        scoring = CompactScoring.of(run.plan.algorithm)
        full, algorithm = run.progress.state.full, StreamsRows.of(run.plan.algorithm)
        stored = device.stored() | algorithm.encoding_rows(run.plan, full, device.projections)
        score = scoring.compact_scorer(run.plan, device.projections, stored, run.clients(new))
    asked = torch.tensor(users)
    items = recommend(score, asked, past, top)
    scores = score(asked).cpu().gather(1, items.clamp(min=0))
    return TopItems(items, scores, [len(items) for items in histories], informative, fallback)


def score_changes(run: LoadedRun, history: Interactions, item: int, top: int) -> tuple[Tensor, Tensor]:
    """The items of one history without which an item's score would fall most, and by how much.

    The model scores the history and, in the same batch, the history without each of its items.
    """
    items = history.items
    rows, columns = (~torch.eye(len(items), dtype=torch.bool)).nonzero(as_tuple=True)
    users = torch.cat([torch.zeros_like(items), rows + 1])
    kept = torch.cat([items, items[columns]])
    ratings = None if history.ratings is None else torch.cat([history.ratings, history.ratings[columns]])
    scorer = run.scorer(
        run.progress.state.full,
        histories=Interactions.from_pairs(users, kept, len(items) + 1, history.num_items, ratings),
    )
    scores = scorer(torch.arange(len(items) + 1)).cpu()[:, item]
    changes, places = (scores[0] - scores[1:]).sort(descending=True, stable=True)
    return items[places[:top]], changes[:top]


def nearest_items(run: LoadedRun, item: int, top: int) -> tuple[Tensor, Tensor]:
    """The items whose vectors have the largest cosine with an item's, and these."""
    num_items = run.interactions.num_items
    tables = {name: shape for name, shape in run.plan.architecture.tables.items() if shape[0] == num_items}
    vectors = torch.cat([run.progress.state.full[name].view(shape) for name, shape in tables.items()], dim=1)
    scores = torch.nn.functional.cosine_similarity(vectors, vectors[item : item + 1], dim=1)
    scores[item] = -torch.inf
    values, items = scores.topk(min(top, num_items - 1))
    return items, values


@dataclass(frozen=True)
class Recommendations:
    """Recommended items, best first, with their scores: ``items, scores = model.recommend(user)``.

    Attributes:
        items: The caller's ids, an array [k], or [users, k] for several users.
        scores: Scores of the same shape.
        titles: Titles of the items, where they have any.
        note: A sentence for the reader, where the model cannot use the history.
    """

    items: Any
    scores: Any
    titles: Any = field(default=None, repr=False)
    note: str = field(default="", repr=False)

    def __iter__(self) -> Any:
        return iter((self.items, self.scores))

    def __getitem__(self, place: int) -> Any:
        return (self.items, self.scores)[place]

    def __len__(self) -> int:
        return len(self.items)

    def rows(self) -> list[dict[str, Any]]:
        """One dict per item: rank, item, title and score."""
        rows: list[dict[str, Any]] = []
        for place in numpy.ndindex(self.items.shape):
            row = {"row": place[0]} if len(place) == 2 else {}
            row |= {"rank": place[-1] + 1, "item": self.items[place].item()}
            row |= {} if self.titles is None else {"title": self.titles[place]}
            rows.append(row | {"score": self.scores[place].item()})
        return rows

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame."""
        return import_pandas().DataFrame(self.rows())

    def __repr__(self) -> str:
        lines = [f"{row['rank']:>3}  {row.get('title') or row['item']}  {row['score']:.4f}" for row in self.rows()]
        return "\n".join([*lines, *([self.note] if self.note else [])]) or "no recommendations"

    def _repr_html_(self) -> str:
        rows = self.rows()
        return html_table(list(rows[0]) if rows else ["item"], [list(row.values()) for row in rows], note=self.note)


def run_frame(data: Dataset, integer_ids: tuple[bool, bool], users: list[int], best: TopItems) -> Any:
    """A pandas DataFrame of a row per user and recommended item, best first."""
    rows, ranks = (best.items >= 0).nonzero(as_tuple=True)
    return import_pandas().DataFrame(
        {
            "user_id": _user_ids(torch.tensor(users)[rows], data, integer_ids[0]),
            "item_id": _item_ids(best.items[rows, ranks], data, integer_ids[1]),
            "rank": ranks.numpy() + 1,
            "score": best.scores[rows, ranks].numpy(),
        }
    )


def qrels_frame(data: Dataset, integer_ids: tuple[bool, bool]) -> Any:
    """A pandas DataFrame of a row per user and held-out item."""
    test = data.test
    return import_pandas().DataFrame(
        {
            "user_id": _user_ids(test.users, data, integer_ids[0]),
            "item_id": _item_ids(test.items, data, integer_ids[1]),
            "rating": numpy.ones(len(test)) if test.ratings is None else test.ratings.numpy(),
        }
    )


def _user_ids(numbers: torch.Tensor, data: Dataset, integer: bool) -> Any:
    ids = numbers.tolist() if data.user_ids is None else [data.user_ids[user] for user in numbers.tolist()]
    return numpy.array(ids, dtype=numpy.int64 if integer else object)


def _item_ids(numbers: torch.Tensor, data: Dataset, integer: bool) -> Any:
    names = {item: item_name(item, data).removeprefix("#" if integer else "") for item in set(numbers.tolist())}
    return numpy.array([names[item] for item in numbers.tolist()], dtype=numpy.int64 if integer else object)


def import_pandas() -> Any:
    """The package pandas; an error where it is not installed."""
    try:
        import pandas
    except ImportError:
        raise InvalidSettings("pandas, which is not installed", "pandas", "pip install pandas") from None
    return pandas


CELL = "padding:2px 10px;text-align:right"


def html_table(heads: list[str], rows: list[list[Any]], *, title: str = "", note: str = "") -> str:
    """An HTML table for a notebook, in its colors, that scrolls where it is wider than the screen."""

    def cell(value: Any) -> str:
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        return f'<td style="{CELL}">{escape(text)}</td>'

    head = "".join(f'<th style="{CELL}">{escape(name)}</th>' for name in heads)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    before = f"<div><b>{escape(title)}</b></div>" if title else ""
    after = f"<div><small>{escape(note)}</small></div>" if note else ""
    return (
        f'{before}<div style="overflow-x:auto"><table style="border-collapse:collapse"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{after}"
    )
