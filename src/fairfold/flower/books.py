"""What the server writes down of its devices beside the sums, in the same checkpoint: the run, words, the survey.

All of it lies in the state's moments as tensors, so that it is saved, restored and rolled back together with the sums:
which word of which device these hold is never known from anywhere else.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from fairfold.flower.protocol import new_word
from fairfold.protocol.words import State
from fairfold.runs.federated import NUMBERING, PLACE, SURVEY
from fairfold.values import Weights

RUN, WORDS, BEHIND = "run", "words", "behind"


class Books:
    """Read from a state, and written back to one."""

    def __init__(self, state: State | None) -> None:
        moments = {} if state is None else state.moments
        words, numbering = moments.get(WORDS, {}), moments.get(NUMBERING, {})
        self.run = int(moments[RUN]["number"]) if RUN in moments else new_word()
        # The number of the word that the sums hold of each device, by the device's name.
        self.held: dict[int, int] = {}
        # The size in which it was said. A change of it said in another would take from sums what these do not hold.
        self.sizes: dict[int, int] = {}
        if words:
            names = words["names"].tolist()
            self.held = dict(zip(names, words["held"].tolist(), strict=True))
            self.sizes = dict(zip(names, words["sizes"].tolist(), strict=True))
        # Answers by how many steps they were behind, where rounds do not wait.
        self.behind: list[int] | None = moments[BEHIND]["steps"].tolist() if BEHIND in moments else None
        # The sums before the first round, by items as they are numbered in this run.
        self.survey: Weights = dict(moments.get(SURVEY, {}))
        self.windows = 0  # of items of which these sums are known, while devices are asked for them
        # Which numbering of the items this is, 0 for the catalogue's own, and the number of each where it is another.
        self.numbering = int(numbering["number"]) if numbering else 0
        self.place: Tensor | None = numbering.get(PLACE)

    def into(self, state: State) -> State:
        """The state with all of this in it."""
        kept: dict[str, Weights] = {RUN: {"number": torch.tensor([self.run])}}
        if self.held:
            sizes = [self.sizes[name] for name in self.held]
            columns: dict[str, Iterable[int]] = {"names": self.held, "held": self.held.values(), "sizes": sizes}
            kept[WORDS] = {key: torch.from_numpy(numpy.fromiter(of, numpy.int64)) for key, of in columns.items()}
        if self.behind is not None:
            kept[BEHIND] = {"steps": torch.tensor(self.behind)}
        if self.survey:
            kept[SURVEY] = self.survey
        if self.place is not None:
            kept[NUMBERING] = {"number": torch.tensor([self.numbering]), PLACE: self.place}
        return replace(state, moments=state.moments | kept)
