"""All attacks on a run: on what its server sees at the run's level, and beside it on what other levels would show."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from fairfold.algorithms.gradient import Gradient
from fairfold.audit import findings
from fairfold.audit.decode import Tracks, can_decode, decoded, judged
from fairfold.audit.devices import Devices
from fairfold.audit.findings import Audit, Finding, level_words
from fairfold.audit.matched import Figure
from fairfold.audit.membership import Known, difference, gaussian_advantage, most_advantage, one_item, one_person
from fairfold.audit.ranking import Target, attack_sums, attack_words
from fairfold.audit.rows import Reader
from fairfold.audit.vectors import vector_error
from fairfold.data import Dataset
from fairfold.errors import FairfoldError
from fairfold.privacy.accounting import sigma_for
from fairfold.settings import Settings
from fairfold.settings.privacy import PlainPrivacy, PrivatePrivacy, SecurePrivacy
from fairfold.simulate.world import World

COHORTS = (5, 20, 100)
"""Sums that are looked at beside the run's own."""

STEPS = 100
"""Into how many steps each view is divided for whoever watches."""

Watch = Callable[[str, float], None]
"""Told what is looked at, and which share of that is done."""


@dataclass(frozen=True)
class View:
    """What a server sees: one answer (a cohort of 1), or a sum; under which settings."""

    name: str
    settings: Settings
    cohort: int
    own: bool


@dataclass
class Auditor:
    """Attacks views of one run.

    Attributes:
        settings: Of the run.
        data: That it was trained on.
        users: Targets of each attack.
        rounds: Over which users are named.
        seed: Of who is looked at.
        watch: Told how it goes.
    """

    settings: Settings
    data: Dataset
    users: int = 100
    rounds: int = 12
    seed: int = 0
    watch: Watch = lambda _what, _share: None

    def views(self, *, compare: bool = True) -> list[View]:
        """The run's own first, and beside it one answer and exact sums of some devices."""
        privacy, everybody = self.settings.privacy, self.data.num_users
        private = isinstance(privacy, PrivatePrivacy)
        drawn = min(self.settings.fleet.clients_per_round or everybody, everybody)
        name = f"the sum of {drawn:,}{' with noise' if private else ''}"
        one = View("one answer", self.at("plain"), 1, own=not privacy.sums_alone)
        found = [View(name, self._with_some_outside(), drawn, own=True)] if privacy.sums_alone else [one]
        if not compare:
            return found
        found += [one] if privacy.sums_alone else []
        cohorts = {min(cohort, everybody) for cohort in COHORTS} | ({drawn} if private else set())
        for cohort in sorted(cohorts - ({drawn} if privacy.sums_alone and not private else set())):
            try:
                found.append(View(f"the sum of {cohort:,}", self.at("secure", cohort), cohort, own=False))
            except FairfoldError:  # a method whose answers are no sums
                break
        return found

    def _with_some_outside(self) -> Settings:
        """The run's, in which a sum may do without some: else there is nobody to compare with."""
        privacy, most = self.settings.privacy, self._most()
        if not isinstance(privacy, SecurePrivacy) or privacy.smallest_cohort <= most:
            return self.settings
        return self.settings.with_changes({"privacy.smallest_cohort": most})

    def _most(self) -> int:
        """Of all clients, without a fifth who are left out of a sum, and another who may be targets."""
        return max(2, self.data.num_users - 2 * (self.data.num_users // 5))

    def at(self, level: str, cohort: int | None = None) -> Settings:
        """The run's at another level, with sums of so many."""
        changes: dict[str, object] = {"privacy.level": level}
        if cohort is not None:
            everybody = self.data.num_users
            changes["privacy.smallest_cohort"] = max(2, min(cohort, self._most()))
            changes["fleet.clients_per_round"] = cohort if cohort < everybody else None
        return self.settings.with_changes(changes)

    def audit(self, *, compare: bool = True) -> Audit:
        """All attacks on all views."""
        privacy, found = self.settings.privacy, list[Finding]()
        views = self.views(compare=compare)
        for view in views:
            found += self.attacked(view)
        words = [level_words(privacy, _bound(privacy)), *_broken(found, _bound(privacy))]
        if not can_decode(World.of(self.settings, self.data).plan):
            words.append(
                f"No way to read pairs from sums of algorithm.kind={self.settings.algorithm.kind!r} was tried: that is "
                "no proof that there is none."
            )
        return Audit(privacy.level, words, found, self.seed)

    def attacked(self, view: View) -> list[Finding]:
        """All attacks on one view."""
        devices = Devices.of_run(World.of(view.settings, self.data))
        reader, done = Reader(devices), 0
        source = torch.Generator().manual_seed(self.seed)

        def advance() -> None:
            nonlocal done
            done += 1
            self.watch(view.name, min(done / STEPS, 1.0))

        attack = self._on_words if view.cohort == 1 else self._on_sums
        return attack(view, devices, reader, source, advance)

    # -- one answer ----------------------------------------------------------------------------------------------------

    def _on_words(
        self, view: View, devices: Devices, reader: Reader, source: torch.Generator, advance: Callable[[], None]
    ) -> list[Finding]:
        plan, taking = devices.fleet.plan, devices.fleet.taking_part
        users = taking[torch.randperm(len(taking), generator=source)[: self.users]].tolist()
        targets = attack_words(devices, reader, users, source, advance)
        errors = [
            error
            for seen, secret in devices.words_and_secrets(users)
            if (error := vector_error(plan, seen, secret)) is not None
        ]
        found = self._ranked(view, devices, targets)
        if errors:
            what = findings.DIRECTION if isinstance(plan.algorithm, Gradient) else findings.VECTOR
            middle = Figure(median(errors), min(errors), max(errors), len(errors))
            found.insert(0, Finding.of(view.name, what, middle, None, own=view.own, note="median, least and most"))
        guessed, _ = one_item(devices, reader, 1, self.users, source, advance)
        found.append(Finding.of(view.name, findings.ONE_ITEM, Figure.of(guessed), 0.5, own=view.own))
        everybody = Figure(1.0, 1.0, 1.0, len(taking))
        found.append(
            Finding.of(view.name, findings.NAMED, everybody, 0.0, own=view.own, note="an answer comes with its sender")
        )
        return found

    def _ranked(self, view: View, devices: Devices, targets: list[Target]) -> list[Finding]:
        """By size of device where each answer is seen alone; of sums also what is found of who has no part in them."""
        found, names = list[Finding](), [str(capacity) for capacity in devices.fleet.plan.capacities]
        inside = [one for one in targets if one.inside]
        groups = [
            (names[size], [one for one in inside if one.size == size]) for size in sorted({t.size for t in targets})
        ]
        if view.cohort > 1:
            groups = [("all", inside)]
        for group, of in groups:
            for attack, key, chance in ((findings.RANKED, "auc", 0.5), (findings.FIRST, "precision", None)):
                figure = Figure.of([getattr(target, key) for target in of])
                found.append(Finding.of(view.name, attack, figure, chance, own=view.own, group=group))
        without = {target.user: target for target in targets if not target.inside}
        if without:
            pairs = [(one, without[one.user]) for one in inside if one.user in without]
            others = Figure.of([other.auc for _, other in pairs])
            beyond = Figure.of([0.5 + one.auc - other.auc for one, other in pairs])
            found.append(Finding.of(view.name, findings.OTHERS, others, 0.5, own=view.own))
            found.append(Finding.of(view.name, findings.BEYOND, beyond, 0.5, own=view.own))
        return found

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _on_sums(
        self, view: View, devices: Devices, reader: Reader, source: torch.Generator, advance: Callable[[], None]
    ) -> list[Finding]:
        plan, found, known = devices.fleet.plan, list[Finding](), Known(devices, view.cohort, source)
        targets = attack_sums(devices, reader, view.cohort, self.users, source, advance)
        found += self._ranked(view, devices, targets)
        guessed, without = one_item(devices, reader, view.cohort, self.users, source, advance, known)
        found.append(Finding.of(view.name, findings.ONE_ITEM, Figure.of(guessed), 0.5, own=view.own))
        if without:
            found.append(Finding.of(view.name, findings.ITEM_OTHERS, Figure.of(without), 0.5, own=view.own))
        inside = one_person(devices, view.cohort, self.users, source, advance, known)
        found.append(Finding.of(view.name, findings.ONE_PERSON, Figure.of(inside), 0.5, own=view.own))
        told = difference(devices, view.cohort, self.users, source, advance)
        note = f"at most {_bound(view.settings.privacy):.3f}"
        found.append(Finding.of(view.name, findings.DIFFERENCE, Figure.of(told), 0.0, own=view.own, note=note))
        if can_decode(plan):
            found += self._decoded(view, devices, advance)
        return found

    def _decoded(self, view: View, devices: Devices, advance: Callable[[], None]) -> list[Finding]:
        """Histories that can be read; over several rounds, with the cohorts that the run would draw, whose they are."""
        shares, wrong, tracks, there = list[float](), 0, Tracks(), set[int]()
        rounds = min(self.rounds, view.settings.run.rounds)
        everybody = view.cohort >= len(devices.fleet.taking_part)
        for number in range(1 if everybody else rounds):
            cohort = devices.fleet.cohort(number).tolist()
            histories = [one for seen in devices.sums(cohort) for one in decoded(devices.fleet.plan, seen)]
            read = judged(histories, {user: self.data.train.of(user) for user in cohort})
            wrong += read.wrong
            if number == 0:  # what a first word says; later ones may say less
                shares = list(read.shares.values())
            tracks.note(histories, cohort, read.whose)
            there |= set(cohort)
            advance()
            if number + 1 < rounds and not everybody:
                devices = devices.after_a_round()
        note = f"{wrong:,} wrong pairs" if wrong else ""
        found = [Finding.of(view.name, findings.DECODED, Figure.of(shares), 0.0, own=view.own, note=note)]
        right, false = tracks.named()
        share = right / max(len(there), 1)
        note = f"{right} of {len(there)}, {false} wrongly, {1 if everybody else rounds} rounds"
        note = f"{note}; everybody is in every cohort" if everybody else note
        named = Figure(share, share, share, len(there))
        return [*found, Finding.of(view.name, findings.NAMED, named, 0.0, own=view.own, note=note)]


def _bound(privacy: PlainPrivacy) -> float:
    """What no attacker's advantage exceeds: by (ε, δ), and by the Gaussian noise that these ask for."""
    if not isinstance(privacy, PrivatePrivacy):
        return 1.0
    noise = gaussian_advantage(sigma_for(privacy.epsilon, privacy.delta))
    return min(noise, most_advantage(privacy.epsilon, privacy.delta))


def _broken(found: list[Finding], bound: float) -> list[str]:
    """What is to be said where an attack on the run's own view does better than noise of that size can let it."""
    most = [one for one in found if one.own and one.attack == findings.DIFFERENCE and one.low > bound]
    return [
        f"WARNING: the advantage of who knows all others is {one.value:.3f}, above {bound:.3f}: noise is missing. Do "
        "not call this run private."
        for one in most
    ]
