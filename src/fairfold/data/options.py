"""What can be asked of ``prepare``."""

from dataclasses import asdict, dataclass
from pathlib import Path

from fairfold.data.layouts import Wanted
from fairfold.errors import InvalidData

SPLIT = 0.7


@dataclass(frozen=True)
class Options:
    """What becomes of the interactions between the source and the prepared data set.

    Attributes:
        top_users: Keep the users with most interactions, this many; None keeps all.
        core: Keep users and items with at least this many interactions each, repeatedly until all have them (k-core).
        ratings: Keep the ratings and leave out what is not rated; otherwise every interaction counts as one.
        min_rating: Keep only what is rated at least this high, as implicit feedback.
        split: Share of a user's interactions that is trained on; None is 0.7. A split of the publisher is kept.
        resplit: Pool a published split and split anew.
        valid: Share of a user's train interactions put aside for validation.
        seed: Seed of the split.
        user_column: Name of the user column, where it is not found by itself.
        item_column: Name of the item column.
        rating_column: Name of the rating column.
        separator: What stands between the fields of a line.
        scale: Lowest and highest rating that can be right.
        images: Folder of the images, for a folder that holds only their writers.
    """

    top_users: int | None = None
    core: int = 0
    ratings: bool = False
    min_rating: float | None = None
    split: float | None = None
    resplit: bool = False
    valid: float = 0.0
    seed: int = 0
    user_column: str | None = None
    item_column: str | None = None
    rating_column: str | None = None
    separator: str | None = None
    scale: tuple[float, float] | None = None
    images: str | Path | None = None

    def __post_init__(self) -> None:
        checks = (
            ("top_users", self.top_users is None or self.top_users >= 1, "a number of at least 1"),
            ("core", self.core >= 0, "a number of at least 0"),
            ("split", self.split is None or 0 < self.split <= 1, "a share above 0 and at most 1"),
            ("valid", 0 <= self.valid < 1, "a share of at least 0 and below 1"),
            ("seed", self.seed >= 0, "a number of at least 0"),
            (
                "separator",
                self.separator is None or (self.separator != "" and not set(self.separator) & set('"\r\n')),
                "a text without quotes and line breaks",
            ),
            ("scale", self.scale is None or self.scale[0] < self.scale[1], "the lowest rating, then the highest"),
            ("min_rating", not (self.ratings and self.min_rating is not None), "either ratings or min_rating"),
        )
        for name, good, needed in checks:
            if not good:
                raise InvalidData(f"{name} = {getattr(self, name)!r}", needed, "Change that option.")

    @property
    def wanted(self) -> Wanted:
        """What is said about the columns of the source."""
        return Wanted(self.user_column, self.item_column, self.rating_column, self.separator, self.scale)

    def chosen(self) -> dict[str, object]:
        """The options that differ from their defaults, for the manifest and the name in the cache."""
        plain = asdict(Options())
        given = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {name: value for name, value in given.items() if value != plain[name]}
