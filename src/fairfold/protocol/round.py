"""A round of a federation: the page that reads like the paper's Algorithms 1 (server) and 2 (client).

What a device computes and what the server makes of it is the algorithm's; how answers come about is a backend's: one
client after another (the oracle), in threads, all in one program, on a GPU, over a network. All give the same sums.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from fairfold.protocol.faults import Rejections, spoil
from fairfold.protocol.fleet import Fleet
from fairfold.protocol.hearing import hearing_of
from fairfold.protocol.people import People
from fairfold.protocol.turns import turn_of
from fairfold.protocol.words import State, Visit, Word

Backend = Callable[[People, Iterable[Visit], Mapping[int, str]], Iterator[Word]]
"""Yields what clients have to say, of one or of several of a size together; of those named last each alone."""


def run_round(state: State, fleet: Fleet, people: People, rejections: Rejections, backend: Backend) -> State:
    """One round: sample, reduce once per size, send, train, check, sum per size, recover once, update."""
    plan, algorithm, number = fleet.plan, fleet.plan.algorithm, state.round_number
    turn = turn_of(fleet, state)  # C ← a random set of clients; ψ ← projection(S, θ), once per size
    cohort, ranks, refused = turn.cohort, fleet.ranks, list[tuple[int, str]]()
    failing, hearing = fleet.faults(number, cohort), hearing_of(people, fleet.size[cohort].tolist(), ranks)
    with ranks.one_for_all():
        visits = hearing.shared(turn.visits)
        for word in backend(people, visits, hearing.apart(cohort, failing | turn.stale)):  # Optimise Fᵢ(Sᵢψᵢ)
            answer = spoil(word.answer, failing.get(word.clients[0]))
            problem = turn.stale.get(word.clients[0]) or algorithm.problem(plan, word.sent, answer)
            if algorithm.keeps == "learned":  # sums that remember: a word counts as said once it is added
                people.keep(word.clients, word.own)
            if problem is not None or answer is None:
                refused += [(client, problem or "no answer") for client in word.clients]
                continue
            hearing.add(word, answer)
    ranks.spoke(cohort)
    totals = hearing.totals(refused)
    for client, reason in ranks.gathered(refused):
        rejections.note(number + 1, client, reason)
    return turn.into(algorithm.apply(plan, state, totals))  # θ ← Σ pᵢ Sᵢψᵢ′


def in_turn(people: People, visits: Iterable[Visit], alone: Mapping[int, str]) -> Iterator[Word]:  # noqa: ARG001
    """Clients one after the other, each as its algorithm specifies: the oracle for everything faster."""
    plan = people.plan
    for visit in visits:
        client = people.client(visit.client, visit.sent.round_number)
        answer, own = plan.algorithm.answer(plan, visit.sent, client)
        yield Word(visit.sent, [visit.client], answer, own)
