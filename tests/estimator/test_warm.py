"""Old and new interactions as one data set, found by their ids."""

from types import SimpleNamespace
from typing import Any

import polars
import pytest

from fairfold.errors import InvalidSettings
from fairfold.estimator.fitting import join_interactions
from fairfold.estimator.inputs import InputData, read_interactions

OLD: dict[str, list[Any]] = {"user": [1, 1, 2, 2], "item": [10, 11, 10, 12], "rating": [1.0, 2.0, 3.0, 4.0]}


def table(**columns: list[Any]) -> polars.DataFrame:
    return polars.DataFrame(columns)


def together(new: polars.DataFrame, titles: Any = None, new_titles: Any = None, **options: Any) -> InputData:
    """Of the old interactions the first of user 2 is held out."""
    frame = table(**OLD)
    old = read_interactions(frame[[0, 1, 3]], {"ratings": True}, titles, test=frame[[2]])
    start: Any = SimpleNamespace(stored_data=old.data, integer_ids=old.integer_ids)
    return join_interactions(start, read_interactions(new, {"ratings": True, "split": 1.0} | options, new_titles))


def rated(taken: InputData, part: str) -> dict[tuple[str, str], float]:
    data = taken.data
    chosen = getattr(data, part)
    assert data.user_ids is not None
    assert data.item_ids is not None
    users, items = ([ids[at] for at in of.tolist()] for ids, of in
                    ((data.user_ids, chosen.users), (data.item_ids, chosen.items)))  # fmt: skip
    return dict(zip(zip(users, items, strict=True), [] if not users else chosen.ratings.tolist(), strict=True))


def test_the_last_rating_counts_and_what_is_trained_on_is_not_held_out() -> None:
    found = together(table(user=[2, 3, 1], item=[10, 13, 11], rating=[5.0, 1.0, 4.0]))
    assert rated(found, "train") == {("1", "10"): 1, ("1", "11"): 4, ("2", "12"): 4, ("2", "10"): 5, ("3", "13"): 1}
    assert rated(found, "test") == {}
    other = together(table(user=[3], item=[10], rating=[2.0]))
    assert rated(other, "test") == {("2", "10"): 3}


def test_ids_are_whole_numbers_where_all_of_them_are() -> None:
    assert together(table(user=[3], item=[13], rating=[1.0])).integer_ids == (True, True)
    assert together(table(user=["ann"], item=[13], rating=[1.0])).integer_ids == (False, True)
    frame = table(user=["ann"], item=["b"], rating=[1.0])
    old: Any = SimpleNamespace(stored_data=read_interactions(frame, {"ratings": True}).data, integer_ids=(False, False))
    assert join_interactions(old, read_interactions(table(**OLD), {"ratings": True})).integer_ids == (False, False)


def test_titles_stay_unless_there_is_a_new_one() -> None:
    new = table(user=[3, 3], item=[11, 13], rating=[1.0, 1.0])
    found = together(new, {"10": "ten", "11": "eleven"}, {"11": "", "13": "thirteen"}).data
    assert found.item_ids is not None
    assert found.titles is not None
    named = dict(zip(found.item_ids, found.titles, strict=True))
    assert named == {"10": "ten", "11": "eleven", "12": "", "13": "thirteen"}
    newer = together(new, {"11": "eleven"}, {"11": "XI"}).data
    assert newer.item_ids is not None
    assert newer.titles is not None
    assert newer.titles[newer.item_ids.index("11")] == "XI"
    assert together(new).data.titles is None


def test_ratings_do_not_join_what_has_none() -> None:
    with pytest.raises(InvalidSettings, match="interactions with ratings and without"):
        together(table(user=[3], item=[13]), ratings=False)
