"""What a model suggests: the best items for known and new users, as arrays with their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from fairfold.metrics.ranking import recommend
from fairfold.metrics.references import Popularity
from fairfold.projections import Assignment
from fairfold.runs.device import device_model

if TYPE_CHECKING:
    from torch import Tensor

    from fairfold.data import Interactions
    from fairfold.runs.opened import OpenRun
    from fairfold.subspace import Capacity


@dataclass(frozen=True)
class Best:
    """The best items of some users, and their scores, [users, k]; -1 where there are no more."""

    items: Tensor
    scores: Tensor
    mine: list[int]  # how many items each user has, which are left out
    telling: list[int]  # how many of these say what the user likes
    popular: bool  # none does: the order is that of popularity


def best_items(
    opened: OpenRun, users: list[int], top: int, *, new: Interactions | None = None, capacity: Capacity | None = None
) -> Best:
    """By the server's model, or by the bytes of a device of some capacity; of ``new`` users by their histories."""
    data, rated = opened.interactions, opened.settings.predicts_ratings
    device = None if capacity is None else device_model(opened, capacity)
    held = None if device is None else [Assignment(device.projections)]
    if device is None:
        score = opened.scorer(opened.progress.state.full, held, new)
    else:
        people = opened.people(new)
        score = opened.plan.algorithm.stored_scorer(opened.plan, device.projections, device.stored(), people)
    past = data.train if new is None else new
    mine = [past.of(user) for user in users]
    telling = [int(opened.telling(items, held).sum()) for items in mine]
    popular = not any(telling) and not rated
    chosen = Popularity(data.train) if popular else score
    asked = torch.tensor(users)
    items = recommend(chosen, asked, past, top)
    scores = chosen(asked).cpu().gather(1, items.clamp(min=0))
    return Best(items, scores, [len(items) for items in mine], telling, popular)


@dataclass(frozen=True)
class Suggestions:
    """Items, best first, with their scores: ``items, scores = model.recommend(user)``.

    Attributes:
        items: Ids as the caller knows them, an array [k], or [users, k] where several users were asked for.
        scores: Their scores, of the same shape.
        titles: Names of the items, where they have any.
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
        lines = [(self.items, self.scores, self.titles)]
        if self.items.ndim == 2:
            names = [None] * len(self.items) if self.titles is None else self.titles
            lines = list(zip(self.items, self.scores, names, strict=True))
        found = []
        for number, (items, scores, titles) in enumerate(lines):
            for rank, (item, score) in enumerate(zip(items.tolist(), scores.tolist(), strict=True)):
                row = {"row": number} if self.items.ndim == 2 else {}
                row |= {"rank": rank + 1, "item": item}
                row |= {} if titles is None else {"title": titles[rank]}
                found.append(row | {"score": score})
        return found

    def to_pandas(self) -> Any:
        """The same as a pandas DataFrame."""
        return pandas().DataFrame(self.rows())

    def __repr__(self) -> str:
        lines = [f"{row['rank']:>3}  {row.get('title') or row['item']}  {row['score']:.4f}" for row in self.rows()]
        return "\n".join([*lines, *([self.note] if self.note else [])]) or "no suggestions"

    def _repr_html_(self) -> str:
        rows = self.rows()
        return html_table(list(rows[0]) if rows else ["item"], [list(row.values()) for row in rows], note=self.note)


def pandas() -> Any:
    """The package, or what to do where it is not there."""
    try:
        import pandas as found
    except ImportError:
        from fairfold.errors import InvalidSettings

        raise InvalidSettings("pandas, which is not installed", "pandas", "pip install pandas") from None
    return found


CELL = "padding:2px 10px;text-align:right"


def html_table(heads: list[str], rows: list[list[Any]], *, title: str = "", note: str = "") -> str:
    """A table for a notebook, in its colours, that scrolls where it is wider than the screen."""
    shown: Callable[[Any], str] = lambda value: f"{value:.4f}" if isinstance(value, float) else str(value)  # noqa: E731
    head = "".join(f'<th style="{CELL}">{escape(name)}</th>' for name in heads)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{escape(shown(value))}</td>' for value in row) + "</tr>" for row in rows
    )
    before = f"<div><b>{escape(title)}</b></div>" if title else ""
    after = f"<div><small>{escape(note)}</small></div>" if note else ""
    return (
        f'{before}<div style="overflow-x:auto"><table style="border-collapse:collapse"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{after}"
    )
