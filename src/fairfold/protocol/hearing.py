"""What the server hears of a round: sums of answers as they are, or through the words that masks hide.

In a simulation nothing has to be masked, as masks cancel: the sums of the same integers are what a secure protocol
gives, number for number.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from fairfold.privacy.encoding import Encoding, Heard, Layout, Segment, Words, added
from fairfold.privacy.noise import enough
from fairfold.protocol.noising import noised, simulated, spare_for
from fairfold.protocol.people import People
from fairfold.protocol.plan import Plan
from fairfold.protocol.ranks import ONE, Ranks, summed
from fairfold.protocol.words import Answer, Sent, Totals, Visit, Word
from fairfold.settings.privacy import PrivatePrivacy, SecurePrivacy


class Hearing:
    """The sums of a round, each answer seen as it is."""

    def __init__(self, people: People, ranks: Ranks = ONE) -> None:
        self.people, self.plan, self._totals = people, people.plan, Totals()
        self.ranks, self._asked_of_all = ranks, dict[tuple[int, int], Sent]()

    def shared(self, visits: Iterable[Visit]) -> Iterable[Visit]:
        """Those of this process, of all."""
        if self.ranks.many == 1:
            return visits
        everybody = list(visits)
        self._asked_of_all = {(visit.sent.size, visit.sent.round_number): visit.sent for visit in everybody}
        return [visit for visit in everybody if self.ranks.has(visit.client)]

    def apart(self, cohort: list[int], failing: Mapping[int, str]) -> dict[int, str]:
        """Of whom each has to be heard alone."""
        return dict(failing)

    def add(self, word: Word, answer: Answer) -> None:
        """Add what was said; who speaks to sums that remember keeps what the server now holds."""
        if self.plan.algorithm.keeps == "acknowledged":
            self.people.keep(word.clients, word.own)
        self._totals.add(word.sent, answer, alone=self.plan.method.per_client)

    def totals(self, refused: list[tuple[int, str]]) -> Totals:
        """What the server works with; who is not heard after all is added to those refused."""
        if self.ranks.many == 1:
            return self._totals
        return summed(self.ranks, self.plan, self._totals, list(self._asked_of_all.values()))


class SecureHearing(Hearing):
    """The same through words of 32 bits: a sum of fewer devices than the minimum is not opened.

    Answers on a grid may come of many devices at once; of others each is rounded by itself, as on a device.
    """

    def __init__(self, people: People, cohort: Mapping[int, int], ranks: Ranks = ONE) -> None:
        super().__init__(people, ranks)
        self._cohort, self._devices, self._words = cohort, max(1, sum(cohort.values())), list[Word]()
        self._sent: dict[int, Sent] = {}
        self._sums: dict[int, Words] = {}
        self._speakers: Counter[int] = Counter()

    def apart(self, cohort: list[int], failing: Mapping[int, str]) -> dict[int, str]:
        """Everybody, where answers lie on no grid."""
        return dict(failing) if self.plan.algorithm.grids else dict.fromkeys(cohort, "") | dict(failing)

    def add(self, word: Word, answer: Answer) -> None:
        """Add the words of an answer; what is kept of it waits until the sum is known to be opened."""
        sent, size = word.sent, word.sent.size
        self._sent.setdefault(size, sent)
        self._words.append(word)
        self._speakers[size] += len(word.clients)
        said = Heard(as_change(self.plan, sent, answer))
        words = encoding_of(self.plan, {size: sent}, self._devices).encode(said, size, together=len(word.clients))
        self._sums[size] = added(self._sums.get(size), words)

    def totals(self, refused: list[tuple[int, str]]) -> Totals:
        """Decode every sum that has enough devices; what the others said was never heard."""
        chosen, found = self.plan.settings.privacy, Totals()
        assert isinstance(chosen, SecurePrivacy)
        self._over_ranks()
        if not self._sent:
            return found
        encoding = encoding_of(self.plan, self._sent, self._devices)
        opened: dict[Segment, Words] = {}
        for segment in encoding.layout.segments:
            if self._speakers_of(segment) >= self._fewest(chosen, segment):
                for size in segment.owners:
                    part = self._sums[size][segment.start : segment.stop]
                    opened[segment] = added(opened.get(segment), part)
        if isinstance(chosen, PrivatePrivacy):
            opened = {segment: self._noised(encoding, segment, words) for segment, words in opened.items()}
        for word in self._words:
            if not any(segment in opened for segment in encoding.layout.of_size(word.sent.size)):
                fewest = max(self._fewest(chosen, segment) for segment in encoding.layout.of_size(word.sent.size))
                few = f"a sum of fewer than {chosen.smallest_cohort} devices"
                few = few if fewest == chosen.smallest_cohort else "too few devices for their noise"
                refused += [(client, few) for client in word.clients]
            elif self.plan.algorithm.keeps == "acknowledged":
                self.people.keep(word.clients, word.own)
        for size, heard in encoding.decode(opened).items():
            found.add(self._sent[size], from_change(self.plan, self._sent[size], heard.answer))
        return found

    def _over_ranks(self) -> None:
        """The sums and their speakers over all processes: whole numbers, the same however they are shared out."""
        if self.ranks.many == 1:
            return
        sent = {size: asked for (size, _), asked in self._asked_of_all.items()}
        encoding = encoding_of(self.plan, sent, self._devices)
        for size in sorted(sent):
            words = self._sums.get(size)
            whole = torch.zeros(encoding.layout.length(size) + 1, dtype=torch.int64)
            if words is not None:
                whole[:-1], whole[-1] = torch.from_numpy(words.astype("int64")), self._speakers[size]
            self.ranks.add_up([whole])
            if int(whole[-1]):
                self._sent[size], self._speakers[size] = sent[size], int(whole[-1])
                self._sums[size] = (whole[:-1] & 0xFFFFFFFF).numpy().astype("uint32")

    def _speakers_of(self, segment: Segment) -> int:
        return sum(self._speakers[size] for size in segment.owners)

    def _asked(self, segment: Segment) -> int:
        return sum(self._cohort[size] for size in segment.owners)

    def _fewest(self, chosen: SecurePrivacy, segment: Segment) -> int:
        """How many devices a sum has to have: for noise that devices add, as many as make it enough."""
        adds = isinstance(chosen, PrivatePrivacy) and chosen.noise == "devices"
        return max(chosen.smallest_cohort, enough(self._asked(segment)) if adds else 0)

    def _noised(self, encoding: Encoding, segment: Segment, words: Words) -> Words:
        """With noise on all that is let out."""
        settings, number = self.plan.settings, next(iter(self._sent.values())).round_number
        draw = simulated(settings, number)
        for name, _ in encoding.layout.ordered(segment.owners[0]):
            asked, heard = self._asked(segment), self._speakers_of(segment)
            words = noised(settings, encoding, name, segment, asked, heard, words, draw)
        return words


def hearing_of(people: People, sizes: list[int], ranks: Ranks = ONE) -> Hearing:
    """By what the settings say of privacy; ``sizes`` are those of the devices that are asked."""
    secure = people.plan.settings.privacy.sums_alone
    return SecureHearing(people, Counter(sizes), ranks) if secure else Hearing(people, ranks)


def encoding_of(plan: Plan, sent: Mapping[int, Sent], devices: int) -> Encoding:
    """How answers to what was sent to some sizes become words, in a sum of at most so many devices."""
    algorithm, chosen = plan.algorithm, plan.settings.privacy
    assert isinstance(chosen, SecurePrivacy)
    layout = Layout({size: algorithm.answer_shapes(plan, of) for size, of in sent.items()}, algorithm.prefixes)
    spare = spare_for(plan.settings, algorithm.grids, devices)
    return Encoding(layout, chosen.bound, devices, algorithm.grids, spare, algorithm.bounds)


def as_change(plan: Plan, sent: Sent, answer: Answer) -> Answer:
    """What becomes words: of an answer that is a whole model its weighted change, which is small."""
    if not plan.algorithm.values:
        return answer
    sums = {name: of - answer.weight * sent.vectors[name] for name, of in answer.sums.items()}
    return replace(answer, sums=sums)


def from_change(plan: Plan, sent: Sent, answer: Answer) -> Answer:
    """The sum of answers of which :func:`as_change` was summed; on a grid in double precision, as it is exact."""
    if not plan.algorithm.values:
        exact = plan.algorithm.grids
        dtype = next(iter(sent.vectors.values())).dtype
        return replace(answer, sums={name: of if name in exact else of.to(dtype) for name, of in answer.sums.items()})
    sums = {name: (of + answer.weight * sent.vectors[name]).to(sent.vectors[name].dtype) for name, of in
            answer.sums.items()}  # fmt: skip
    return replace(answer, sums=sums)


def stepped_down(sizes: Tensor, order: list[int], least: float) -> Tensor:
    """Which size every device has where sizes with fewer devices than that hold what the next smaller one does.

    Args:
        sizes: Of the devices.
        order: All sizes, the largest first.
        least: How many devices a size needs.
    """
    found = sizes.clone()
    for size, smaller in pairwise(order):
        mine = found == size
        if 0 < int(mine.sum()) < least:
            found[mine] = smaller
    return found


def step_words(before: Tensor, after: Tensor, names: list[str]) -> list[str]:
    """What is to be told of devices that stepped down."""
    told = []
    for size, name in enumerate(names):
        moved = torch.unique(after[(before == size) & (after != size)]).tolist()
        if moved:
            many = int((before == size).sum())
            told.append(
                f"{many:,} devices of {name} hold {names[moved[0]]}: too few to be hidden in a sum of their own."
            )
    return told
