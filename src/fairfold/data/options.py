"""What can be asked of ``prepare``."""

from dataclasses import asdict, dataclass
from pathlib import Path

from fairfold.errors import InvalidData

SPLIT = 0.7


@dataclass(frozen=True)
class Options:
    """What becomes of the interactions between the source and the prepared data set."""

    top_users: int | None = None  # keep the users with most interactions, this many; None keeps all
    core: int = 0  # keep users and items with at least this many interactions, until all have them (k-core)
    ratings: bool = False  # keep the ratings and leave out what is not rated; else every interaction counts as one
    min_rating: float | None = None  # keep only what is rated at least this high, as implicit feedback
    split: float | None = None  # share of a user's interactions to train on, 0.7; a split of the publisher is kept
    resplit: bool = False  # pool a published split and split anew
    valid: float = 0.0  # share of a user's train interactions put aside for validation
    seed: int = 0  # of the split
    user_column: str | int | None = None  # its name, or its place, where it is not found by itself
    item_column: str | int | None = None
    rating_column: str | int | None = None
    separator: str | None = None  # what stands between the fields of a line
    scale: tuple[float, float] | None = None  # lowest and highest rating that can be right
    images: str | Path | None = None  # folder of the images, for a folder that holds only their writers

    def __post_init__(self) -> None:
        quotes = set('"\r\n')
        checks = (
            ("top_users", self.top_users is None or self.top_users >= 1, "a number of at least 1"),
            ("core", self.core >= 0, "a number of at least 0"),
            ("split", self.split is None or 0 < self.split <= 1, "a share above 0 and at most 1"),
            ("valid", 0 <= self.valid < 1, "a share of at least 0 and below 1"),
            ("seed", self.seed >= 0, "a number of at least 0"),
            (
                "separator",
                self.separator != "" and not set(self.separator or "") & quotes,
                "a text without quotes and line breaks",
            ),
            ("scale", self.scale is None or self.scale[0] < self.scale[1], "the lowest rating, then the highest"),
            ("min_rating", not (self.ratings and self.min_rating is not None), "either ratings or min_rating"),
        )
        for name, good, needed in checks:
            if not good:
                raise InvalidData(f"{name} = {getattr(self, name)!r}", needed, "Change that option.")

    @property
    def about_columns(self) -> bool:
        """Whether anything is said that decides how a file is read, beyond the scale of its ratings."""
        return any(value is not None for value in (*self.columns, self.separator))

    @property
    def columns(self) -> tuple[str | None, ...]:
        """The columns of user, item and rating that are named, or numbered from 1."""
        named = self.user_column, self.item_column, self.rating_column
        return tuple(None if name is None else str(name) for name in named)

    def chosen(self) -> dict[str, object]:
        """The options that differ from their defaults, for the manifest and the name in the cache."""
        plain = asdict(Options())
        given = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {name: value for name, value in given.items() if value != plain[name]}
