"""What the server writes down of its devices beside the sums, in the same checkpoint: the run, words, the survey.

All of it lies in the state's moments as tensors, so that it is saved, restored and rolled back together with the sums:
which word of which device these hold is never known from anywhere else.
"""

import secrets
from dataclasses import replace

import torch
from torch import Tensor

from fairfold.protocol.words import State
from fairfold.values import Weights

RUN, WORDS, SURVEY, NUMBERING = "run", "words", "survey", "numbering"


def new_word() -> int:
    """A number that no other order has."""
    return 1 + secrets.randbelow(2**63 - 1)


class Books:
    """Read from a state, and written back to one.

    Attributes:
        run: Number of the run.
        held: The number of the word that the sums hold of each device, by the device's name.
        survey: The sums before the first round, by items as they are numbered in this run; None before there are any.
        numbering: Number of the items' numbering; 0 for the catalogue's own.
        place: The number that every item of the catalogue has in this run, where that is not its own.
    """

    def __init__(self, state: State | None) -> None:
        moments = {} if state is None else state.moments
        self.run = int(moments[RUN]["number"]) if RUN in moments else new_word()
        words = moments.get(WORDS, {})
        self.held: dict[int, int] = (
            dict(zip(words["names"].tolist(), words["held"].tolist(), strict=True)) if words else {}
        )
        self.survey: Weights | None = dict(moments[SURVEY]) if SURVEY in moments else None
        self.numbering, self.place = 0, None
        if NUMBERING in moments:
            self.numbering, self.place = int(moments[NUMBERING]["number"]), moments[NUMBERING]["place"]

    def number_items(self, place: Tensor) -> None:
        """Give the items other numbers than the catalogue's."""
        self.numbering, self.place = new_word(), place.to(torch.int64)

    def into(self, state: State) -> State:
        """The state with all of this in it."""
        kept: dict[str, Weights] = {RUN: {"number": torch.tensor([self.run])}}
        if self.held:
            names, held = zip(*sorted(self.held.items()), strict=True)
            kept[WORDS] = {"names": torch.tensor(names), "held": torch.tensor(held)}
        if self.survey is not None and self.survey:
            kept[SURVEY] = self.survey
        if self.place is not None:
            kept[NUMBERING] = {"number": torch.tensor([self.numbering]), "place": self.place}
        return replace(state, moments=state.moments | kept)
