"""What a cohort that was trained as one program has to say: sums by size, and to every client its own vectors."""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from fairfold.backends.layout import Lookups, whose
from fairfold.protocol.people import People
from fairfold.protocol.words import Answer, Sent, Word, put
from fairfold.values import Weights


class Back:
    """What a trained cohort gives back: to the server sums by size, to every client its own vectors."""

    def __init__(
        self,
        people: People,
        values: Tensor,
        clients: list[int],
        groups: list[int],
        held: dict[int, Sent],
        lookups: Lookups,
        came_from: Tensor,
    ) -> None:
        self._people, self._work, self._algorithm = people, people.work, cast(Any, people.plan.algorithm)
        self._values, self._clients, self._groups, self._held = values, clients, groups, held
        self._lookups, self._came_from = lookups, came_from
        self._change = values - lookups.sections.source[came_from]
        ends = [at + held[group].vectors[name].numel() for group, of in lookups.sections.groups.items()
                for name, at in of.items()]  # fmt: skip
        self._of_server = came_from < max(ends, default=0)
        self._place = whose(put(lookups.ends, values.device), len(self._change))

    def words(self, alone: Mapping[int, str]) -> Iterator[Word]:
        """One per size of those whose answers are good; the others one by one."""
        source, own = self._lookups.sections.source, self._own()
        weights = [self._algorithm.weight(self._people.samples(client)) for client in self._clients]
        heard = [0.0 if client in alone else weight for client, weight in zip(self._clients, weights, strict=True)]
        good = self._largest() <= self._algorithm.largest_change
        factor = (put(heard, source.device, source.dtype) * good)[self._place]
        # Zero times NaN is NaN: what is not counted is left out, not weighted down.
        part = (self._change * factor).masked_fill_(factor == 0, 0)
        sums = torch.zeros_like(source).index_add_(0, self._came_from, part)
        # All is queued by now: only here a GPU is waited for.
        fine = [fine and client not in alone for client, fine in zip(self._clients, good.tolist(), strict=True)]
        for group, starts in self._lookups.sections.groups.items():
            sent = self._held[group]
            mine = [index for index, of in enumerate(self._groups) if of == group]
            linear = all(projection.linear for projection in sent.projections.values())
            together = [index for index in mine if fine[index] and linear]
            weight = sum(weights[index] for index in together)
            if together:
                vectors = {name: sums[at : at + sent.vectors[name].numel()] for name, at in starts.items()}
                # Vectors of their own: not every slice begins where a kernel can read fast.
                if self._algorithm.values:
                    vectors = {name: of.add(sent.vectors[name], alpha=weight) for name, of in vectors.items()}
                else:
                    vectors = {name: of.clone() for name, of in vectors.items()}
                yield self._word(sent, together, Answer(vectors, weight), own)
            for index in mine:
                if index not in together:
                    yield self._word(sent, [index], self._alone(index, weights[index]), own)

    def _word(self, sent: Sent, places: list[int], answer: Answer, own: Weights) -> Word:
        chosen = put(places, self._values.device)
        rows = {name: of[chosen] if len(places) > 1 else of[places[0]] for name, of in own.items()}
        return Word(sent, [self._clients[place] for place in places], answer, rows)

    def _own(self) -> Weights:
        found, start = {}, 0
        for name, size in self._people.work.own.items():
            if name in self._people.private:
                found[name] = self._values[self._lookups.fixed[0][:, start : start + size].long()]
            start += size
        return found

    def _largest(self) -> Tensor:
        """Of each client the largest change; infinity where it has a number that is none."""
        size = self._change.abs().nan_to_num_(nan=math.inf).mul_(self._of_server)
        return torch.stack([size[start:end].amax() for start, end in pairwise([0, *self._lookups.ends])])

    def _alone(self, index: int, weight: float) -> Answer:
        """All that a client sends, what it did not touch as it came."""
        group, mine = self._groups[index], (self._place == index) & self._of_server
        sections, sent = self._lookups.sections, self._held[self._groups[index]].vectors
        start = sections.source if self._algorithm.values else torch.zeros_like(sections.source)
        after = start.index_add(0, self._came_from[mine], self._change[mine])
        sums = {name: after[at : at + sent[name].numel()] * weight for name, at in sections.groups[group].items()}
        return Answer(sums, weight)
