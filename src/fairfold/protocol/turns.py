"""Who is heard before the server takes its next step: all whom it has asked, or those whose answers have come by then.

What a device says is a summand, and it does not matter when it is added. So a round need not wait
(:class:`~fairfold.settings.pace.PaceSettings`): orders stay open from round to round, and an answer counts in the round
in which it comes, as what it is, an answer to what was sent some steps ago. Beyond a bound it is refused.

In a simulation a clock says when answers come. The clock, and the orders that are open, lie in the state's moments as
tensors: a run that is gone on with finds them in the same checkpoint as its model.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairfold.projections.facts import facts_of, projection_of
from fairfold.protocol.words import Sent, State, Visit
from fairfold.settings.pace import PaceSettings
from fairfold.values import Weights

if TYPE_CHECKING:
    from fairfold.protocol.fleet import Fleet
    from fairfold.settings import Settings

CLOCK = "clock"
"""Name of the moment that says what time it is, which orders are open, and what the last round was like."""

ORDER = "order "
"""What the names of moments that hold what was sent begin with; a number follows."""

VECTOR, FACTS = "vector/", "facts"


@dataclass(frozen=True)
class Open:
    """An order that a simulated device is at work on, and when its answer comes."""

    client: int
    sent: Sent
    due: float


@dataclass(frozen=True)
class Turn:
    """The answers of a round: who is heard, who of them is too far behind and why, and what the state is to carry."""

    visits: Iterable[Visit]
    cohort: list[int]
    stale: dict[int, str] = field(default_factory=dict)
    carried: dict[str, Weights] = field(default_factory=dict)

    def into(self, state: State) -> State:
        """The state after the round, with what it carries of clock and open orders."""
        if not self.carried:
            return state
        others = {name: of for name, of in state.moments.items() if not name.startswith(ORDER)}
        return replace(state, moments=others | self.carried)


def turn_of(fleet: "Fleet", state: State) -> Turn:
    """Ask whom a round asks, and hear those whose answers come before its step."""
    number, chosen, ages = state.round_number, fleet.plan.settings.fleet, fleet.plan.algorithm.ages
    if chosen.clock.seconds is None:
        cohort = fleet.cohort(number).tolist()
        return Turn(fleet.visits(state, cohort), cohort)
    now, waiting = opened(state.moments)
    asked = fleet.cohort(number, [order.client for order in waiting]).tolist()
    waiting += [Open(at.client, at.sent, now + float(fleet.seconds[at.client])) for at in fleet.visits(state, asked)]
    if chosen.pace.waits:
        heard, then = waiting, max((order.due for order in waiting), default=now)
    else:
        heard, then = before_step(waiting, chosen.pace, number, now, ages=ages)
    late = {order.client: chosen.pace.late(number - order.sent.round_number, ages=ages) for order in heard}
    clients = [order.client for order in heard]
    left = [order for order in waiting if order.client not in late]
    behind = [number - order.sent.round_number for order in heard]
    clock = _told(state.moments.get(CLOCK, {}), fleet, asked, clients, behind) | _places(left)
    clock |= {"now": _double([then]), "seconds": _double([then - now])}
    stale = {client: why for client, why in late.items() if why is not None}
    visits = [Visit(order.client, order.sent) for order in heard]
    return Turn(visits, clients, stale, {CLOCK: clock} | _stored(left, number))


def before_step(
    waiting: list[Open], pace: PaceSettings, number: int, now: float, *, ages: bool
) -> tuple[list[Open], float]:
    """The answers that come before the next step, and when that is taken: not before one has come that counts."""
    heard, counting = list[Open](), 0
    for order in sorted(waiting, key=lambda order: order.due):
        if counting and pace.seconds is not None and order.due > now + pace.seconds:
            return heard, max(now + pace.seconds, heard[-1].due)
        heard.append(order)
        counting += pace.late(number - order.sent.round_number, ages=ages) is None
        if counting == pace.answers:
            break
    return heard, max(heard[-1].due, now) if heard else now


def words_of(moments: Mapping[str, Weights], settings: "Settings") -> list[str]:
    """What is told of a run whose rounds did not wait: how far behind its answers were."""
    behind, pace = moments.get(CLOCK, {}).get("behind"), settings.fleet.pace
    if pace.waits or behind is None or not int(behind.sum()):
        return []
    return [behind_words(behind.tolist(), pace, ages=settings.algorithm.ages)]


def behind_words(counts: list[int], pace: PaceSettings, *, ages: bool) -> str:
    """The same of counts of answers by how many steps they were behind, the last of them of those beyond the bound."""
    *counted, beyond = counts
    if not ages:
        return (
            f"Rounds did not wait: {sum(counts):,} answers counted, {beyond:,} of them more than {pace.staleness} "
            "steps behind: what devices say here does not depend on the model that they were sent."
        )
    many = sum(counted)
    mean = sum(steps * count for steps, count in enumerate(counted)) / max(many, 1)
    most = max((steps for steps, count in enumerate(counted) if count), default=0)
    return (
        f"Rounds did not wait: {many:,} answers counted, {mean:.1f} steps behind on the average and {most} at the "
        f"most; {beyond:,} were refused, being more than {pace.staleness} behind."
    )


def counted_behind(before: list[int] | None, behind: Iterable[int], pace: PaceSettings) -> list[int]:
    """Answers by how many steps they were behind, those beyond the bound last; with some more."""
    counts = list(before) if before is not None else [0] * (pace.staleness + 2)
    for steps in behind:
        counts[min(steps, pace.staleness + 1)] += 1
    return counts


def opened(moments: Mapping[str, Weights]) -> tuple[float, list[Open]]:
    """What time it is, and which orders are open."""
    clock = moments.get(CLOCK)
    if clock is None:
        return 0.0, []
    sent = [_sent(moments[f"{ORDER}{place}"]) for place in range(sum(name.startswith(ORDER) for name in moments))]
    rows = zip(clock["clients"].tolist(), clock["orders"].tolist(), clock["due"].tolist(), strict=True)
    return float(clock["now"]), [Open(client, sent[place], due) for client, place, due in rows]


# -- as tensors --------------------------------------------------------------------------------------------------------


def _told(
    before: Mapping[str, Tensor], fleet: "Fleet", asked: list[int], heard: list[int], behind: list[int]
) -> dict[str, Tensor]:
    """What the last round was like, and all of them together."""
    pace = fleet.plan.settings.fleet.pace
    drawn = before["drawn"].clone() if "drawn" in before else torch.zeros(len(fleet.size), dtype=torch.bool)
    drawn[asked] = True
    told = {"asked": _whole(asked), "heard": _whole(heard), "drawn": drawn}
    if not pace.waits:
        counts = before["behind"].tolist() if "behind" in before else None
        told["behind"] = _whole(counted_behind(counts, behind, pace))
    return told


def _different(orders: list[Open]) -> dict[int, Sent]:
    return {id(order.sent): order.sent for order in orders}


def _places(orders: list[Open]) -> dict[str, Tensor]:
    place = {key: number for number, key in enumerate(_different(orders))}
    clients, which = [order.client for order in orders], [place[id(order.sent)] for order in orders]
    due = _double([order.due for order in orders])
    return {"clients": _whole(clients), "orders": _whole(which), "due": due}


def _stored(orders: list[Open], number: int) -> dict[str, Weights]:
    """What was sent to those who have not answered. Of this round it may be the server's own, which a step changes."""
    found: dict[str, Weights] = {}
    for place, sent in enumerate(_different(orders).values()):
        facts = {
            "round": sent.round_number,
            "size": sent.size,
            "projections": {name: facts_of(held) for name, held in sent.projections.items()},
            "context": {name: facts_of(held) for name, held in sent.context.items()},
        }
        mine = sent.round_number == number
        vectors = {VECTOR + name: of.clone() if mine else of for name, of in sent.vectors.items()}
        text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        found[f"{ORDER}{place}"] = vectors | {FACTS: text}
    return found


def _sent(stored: Weights) -> Sent:
    facts = json.loads(bytes(stored[FACTS].tolist()))
    held, context = ({name: projection_of(of) for name, of in facts[key].items()} for key in ("projections", "context"))
    vectors = {name.removeprefix(VECTOR): of for name, of in stored.items() if name != FACTS}
    return Sent(facts["round"], facts["size"], held, vectors, context)


def _double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _whole(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
