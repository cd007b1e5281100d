"""Who takes part in a round: clients by size, the cohort of a round, and those who fail on purpose."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fairfold.errors import InvalidSettings
from fairfold.protocol.faults import fault_of
from fairfold.protocol.hearing import stepped_down
from fairfold.protocol.plan import Plan
from fairfold.protocol.ranks import ONE, Ranks
from fairfold.protocol.sampling import Purpose, generator, sample_cohort
from fairfold.protocol.words import State, Visit
from fairfold.settings.privacy import SecurePrivacy


@dataclass(frozen=True)
class Fleet:
    """The clients of a simulated federation: which of the plan's sizes each has, and who takes part at all."""

    plan: Plan
    size: Tensor
    taking_part: Tensor
    ranks: Ranks = ONE  # processes that share them

    @classmethod
    def of(cls, plan: Plan, num_clients: int) -> "Fleet":
        """Split the clients by the capacity scheme; refuse what cannot work, before any work."""
        chosen = plan.settings.fleet
        if not chosen.pace.waits and chosen.clock.seconds is None:
            given, needed = "fleet.pace in a simulation, in which devices take no time", "how long they take"
            raise InvalidSettings(given, needed, "Say so with fleet.clock.seconds, or leave fleet.pace out.")
        if plan.algorithm.pooled:
            return cls(plan, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        size = _hidden(plan, chosen.groups(num_clients))
        serves = torch.tensor([held.projections is not None for held in plan.assignments(0)])
        return cls(plan, size, serves[size].nonzero().flatten())

    def cohort(self, round_number: int, busy: Sequence[int] = ()) -> Tensor:
        """C, the clients of a round, drawn among those that take part: K of them, or all where they are fewer.

        Who is ``busy`` with an order of an earlier round is one of the K, and is not drawn.
        """
        chosen, many = self.plan.settings.fleet, len(self.taking_part)
        if busy:
            free = self.taking_part[~torch.isin(self.taking_part, torch.tensor(busy))]
            wanted = min((chosen.clients_per_round or many) - len(busy), len(free))
            return free[sample_cohort(self.plan.settings, len(free), round_number, wanted)] if wanted > 0 else free[:0]
        everybody = (chosen.clients_per_round or many) > many and not chosen.replacement
        if self.plan.algorithm.pooled or everybody:
            return self.taking_part
        return self.taking_part[sample_cohort(self.plan.settings, many, round_number)]

    @cached_property
    def seconds(self) -> Tensor:
        """What every client takes for an answer, by the simulated clock."""
        clock, many = self.plan.settings.fleet.clock, len(self.size)
        assert clock.seconds is not None
        source = generator(self.plan.settings, Purpose.SPEED)
        slow = torch.rand(many, generator=source, dtype=torch.float64) < clock.slow
        apart = torch.randn(many, generator=source, dtype=torch.float64)
        return clock.seconds * torch.where(slow, clock.slower, 1.0) * (clock.spread * apart).exp()

    def visits(self, state: State, cohort: list[int]) -> Iterator[Visit]:
        """The clients of a cohort in their order, each with what it receives: reduced once per size, or per hash."""
        if self.plan.method.per_client:
            sent_to = self.plan.sent_alone
            yield from (Visit(client, sent_to(state, int(self.size[client]), client)) for client in cohort)
            return
        size_of = self.size[cohort].tolist()
        sizes = list(dict.fromkeys(size_of))
        sent = dict(zip(sizes, self.plan.algorithm.send(self.plan, state, sizes), strict=True))
        yield from (Visit(client, sent[size]) for client, size in zip(cohort, size_of, strict=True))

    def faults(self, round_number: int, cohort: list[int]) -> dict[int, str]:
        """Which clients fail this round, and in which way."""
        settings, faults = self.plan.settings, self.plan.settings.fleet.faults
        if not any(share for _, share in faults):
            return {}
        drawn = {c: fault_of(faults, generator(settings, Purpose.FAULTS, round_number, c)) for c in cohort}
        return {client: kind for client, kind in drawn.items() if kind is not None}


def _hidden(plan: Plan, size: Tensor) -> Tensor:
    """The sizes of all clients where too few of a size would not be hidden in its sum; refused where all are too few.

    Who speaks to sums that remember stays in a size, so this is by how many of a size are drawn on the average.
    """
    chosen, fleet = plan.settings.privacy, plan.settings.fleet
    if not isinstance(chosen, SecurePrivacy):
        return size
    asked = min(fleet.clients_per_round or len(size), len(size))
    if asked < chosen.smallest_cohort:
        raise InvalidSettings(
            f"{asked} of {len(size)} devices per round with privacy.smallest_cohort={chosen.smallest_cohort}",
            "as many at least, so that a sum hides each of them",
            "Ask all of them (fleet.clients_per_round='none'), lower the minimum, which hides less, or take "
            "privacy.level='plain', which hides nothing.",
        )
    drawn = asked / len(size)
    held = [one.bytes() for one in plan.assignments(0)]
    order = sorted(range(len(held)), key=lambda one: -held[one])
    return stepped_down(size, order, chosen.smallest_cohort / drawn)
