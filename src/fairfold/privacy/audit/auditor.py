"""All attacks on a run: on what its server sees at the run's privacy level, and for comparison at other levels."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import torch
from torch import Generator

from fairfold.algorithms.gradient import Gradient
from fairfold.config import Settings, read_settings
from fairfold.config.files import read_toml
from fairfold.config.fleet import DifferentialPrivacy, PlainPrivacy, SecurePrivacy
from fairfold.config.tables import SYNTHETIC
from fairfold.data import Dataset
from fairfold.errors import FairfoldError, InvalidSettings
from fairfold.federation.algorithm import Centralized
from fairfold.federation.federation import Federation, load_interactions
from fairfold.privacy.accounting import sigma_for
from fairfold.privacy.audit import findings, membership
from fairfold.privacy.audit.findings import Audit, Finding, describe_level
from fairfold.privacy.audit.history import Figure, Target, attack_sums, attack_updates
from fairfold.privacy.audit.reconstruction import (
    HistoryTracks,
    UpdateReader,
    can_decode,
    decode_histories,
    score_decoding,
    vector_error,
)
from fairfold.privacy.audit.replay import Advance, ReplayedClients
from fairfold.runs import checkpoint
from fairfold.runs.folder import DATA, RunFolder, require_run

COHORTS = (5, 20, 100)  # sums that are attacked for comparison with the run's own
STEPS = 100  # steps of progress that are reported for each view
ON_DEVICES = "devices"  # name of the data of a federation's run, which lies on its devices
ProgressCallback = Callable[[str, float], None]  # given the name of the attacked view, and the share that is done


@dataclass(frozen=True)
class View:
    """What a server sees: single updates (a cohort of 1) or sums, under some settings; ``own`` if it is the run's."""

    name: str
    settings: Settings
    cohort: int
    own: bool

    def finding(
        self, attack: str, figure: Figure | list[float], chance: float | None, group: str = "all", note: str = ""
    ) -> Finding:
        """A finding of an attack on this view, from a figure or from one value per target."""
        figure = Figure.of(figure) if isinstance(figure, list) else figure
        return Finding.of(self.name, attack, figure, chance, group=group, note=note, own=self.own)


@dataclass
class Auditor:
    """Attacks views of one run."""

    settings: Settings
    data: Dataset
    users: int = 100  # targets of each attack
    rounds: int = 12  # over which users are named
    seed: int = 0  # of the choice of targets
    progress: ProgressCallback = lambda _view, _share: None

    def views(self, *, compare: bool = True) -> list[View]:
        """The run's own view first; for comparison single updates and exact sums of some cohorts."""
        privacy, num_users = self.settings.privacy, self.data.num_users
        private, sums_only = isinstance(privacy, DifferentialPrivacy), privacy.uses_secure_aggregation
        drawn = min(self.settings.fleet.clients_per_round or num_users, num_users)
        found = [View("one update", self.at("plain"), 1, own=not sums_only)]
        cohorts = {min(cohort, num_users) for cohort in COHORTS}
        if sums_only:
            name = f"the sum of {drawn:,}{' with noise' if private else ''}"
            found.insert(0, View(name, self._with_smaller_cohort(), drawn, own=True))
            cohorts = cohorts | {drawn} if private else cohorts - {drawn}
        if not compare:
            return found[:1]
        for cohort in sorted(cohorts):
            try:
                found.append(View(f"the sum of {cohort:,}", self.at("secure", cohort), cohort, own=False))
            except FairfoldError:  # a method whose updates are not additive
                break
        return found

    def _with_smaller_cohort(self) -> Settings:
        """The run's settings with a minimum cohort that leaves clients outside of a sum, for comparison."""
        privacy, most = self.settings.privacy, self._max_cohort()
        smaller = isinstance(privacy, SecurePrivacy) and privacy.min_cohort > most
        return self.settings.with_changes({"privacy.min_cohort": most}) if smaller else self.settings

    def _max_cohort(self) -> int:
        """All clients but a fifth that are left out of a sum, and another fifth that may be targets."""
        return max(2, self.data.num_users - 2 * (self.data.num_users // 5))

    def at(self, level: str, cohort: int | None = None) -> Settings:
        """The run's settings at another privacy level, with sums over ``cohort`` clients."""
        changes: dict[str, object] = {"privacy.level": level}
        if cohort is not None:
            changes["privacy.min_cohort"] = max(2, min(cohort, self._max_cohort()))
            changes["fleet.clients_per_round"] = cohort if cohort < self.data.num_users else None
        return self.settings.with_changes(changes)

    def audit(self, *, compare: bool = True) -> Audit:
        """Run all attacks on all views."""
        privacy = self.settings.privacy
        found = [finding for view in self.views(compare=compare) for finding in self.attack(view)]
        bound = _advantage_bound(privacy)
        notes = [describe_level(privacy, bound)]
        for one in found:
            if one.own and one.attack == findings.DIFFERENCE and one.low > bound:
                above = f"the advantage of who knows all others is {one.value:.3f}, above {bound:.3f}"
                notes.append(f"WARNING: {above}: noise is missing. Do not call this run private.")
        if not can_decode(Federation.of(self.settings, self.data).plan):
            untried = f"No way to read pairs from sums of algorithm.kind={self.settings.algorithm.kind!r} was tried"
            notes.append(f"{untried}: that is no proof that there is none.")
        return Audit(privacy.level, notes, found, self.seed)

    def attack(self, view: View) -> list[Finding]:
        """Run all attacks on one view."""
        replay = ReplayedClients.of_run(Federation.of(view.settings, self.data))
        done = count(1)

        def advance() -> None:
            self.progress(view.name, min(next(done) / STEPS, 1.0))

        attack = self._attack_updates if view.cohort == 1 else self._attack_sums
        return attack(view, replay, torch.Generator().manual_seed(self.seed), advance)

    def _attack_updates(
        self, view: View, replay: ReplayedClients, source: Generator, advance: Advance
    ) -> list[Finding]:
        reader = UpdateReader(replay)
        plan = replay.sampler.plan
        participants = replay.sampler.participants
        users = participants[torch.randperm(len(participants), generator=source)[: self.users]].tolist()
        targets = attack_updates(replay, reader, users, source, advance)
        errors = [vector_error(plan, seen, secret) for seen, secret in replay.updates_and_secrets(users)]
        known = [error for error in errors if error is not None]
        found = self._history_findings(view, replay, targets)
        if known:
            what = findings.DIRECTION if isinstance(plan.algorithm, Gradient) else findings.VECTOR
            middle = Figure(median(known), min(known), max(known), len(known))
            found.insert(0, view.finding(what, middle, None, note="median, least and most"))
        guessed, _ = membership.infer_item(replay, reader, 1, self.users, source, advance)
        found.append(view.finding(findings.ONE_ITEM, guessed, 0.5))
        named = Figure(1.0, 1.0, 1.0, len(participants))
        found.append(view.finding(findings.NAMED, named, 0.0, note="an update comes with its sender"))
        return found

    def _history_findings(self, view: View, replay: ReplayedClients, targets: list[Target]) -> list[Finding]:
        """Findings on histories: by size for single updates; for sums also of users that are not part of them."""
        found, inside = list[Finding](), [one for one in targets if one.inside]
        groups = {"all": inside}
        if view.cohort == 1:
            capacities, sizes = replay.sampler.plan.capacities, sorted({one.size for one in targets})
            groups = {str(capacities[size]): [one for one in inside if one.size == size] for size in sizes}
        for group, members in groups.items():
            found.append(view.finding(findings.RANKED, [one.auc for one in members], 0.5, group))
            found.append(view.finding(findings.FIRST, [one.precision for one in members], None, group))
        without = {target.user: target for target in targets if not target.inside}
        if without:
            pairs = [(one, without[one.user]) for one in inside if one.user in without]
            found.append(view.finding(findings.OTHERS, [other.auc for _, other in pairs], 0.5))
            found.append(view.finding(findings.BEYOND, [0.5 + one.auc - other.auc for one, other in pairs], 0.5))
        return found

    def _attack_sums(self, view: View, replay: ReplayedClients, source: Generator, advance: Advance) -> list[Finding]:
        reader, background = UpdateReader(replay), membership.BackgroundCache(replay, view.cohort, source)
        chosen = view.cohort, self.users, source, advance
        found = self._history_findings(view, replay, attack_sums(replay, reader, *chosen))
        guessed, without = membership.infer_item(replay, reader, *chosen, background)
        found.append(view.finding(findings.ONE_ITEM, guessed, 0.5))
        if without:
            found.append(view.finding(findings.ITEM_OTHERS, without, 0.5))
        inside = membership.infer_membership(replay, *chosen, background)
        found.append(view.finding(findings.ONE_PERSON, inside, 0.5))
        advantage = membership.infer_by_difference(replay, *chosen)
        note = f"at most {_advantage_bound(view.settings.privacy):.3f}"
        found.append(view.finding(findings.DIFFERENCE, advantage, 0.0, note=note))
        if can_decode(replay.sampler.plan):
            found += self._decoding_findings(view, replay, advance)
        return found

    def _decoding_findings(self, view: View, replay: ReplayedClients, advance: Advance) -> list[Finding]:
        """Decode histories from sums; over the cohorts of several rounds, name their users."""
        shares, wrong = list[float](), 0
        tracks, present = HistoryTracks(), set[int]()
        everybody = view.cohort >= len(replay.sampler.participants)
        rounds = 1 if everybody else min(self.rounds, view.settings.run.rounds)
        for number in range(rounds):
            cohort = replay.sampler.cohort(number).tolist()
            histories = [one for seen in replay.sums(cohort) for one in decode_histories(replay.sampler.plan, seen)]
            score = score_decoding(histories, {user: self.data.train.of(user) for user in cohort})
            wrong += score.wrong
            if number == 0:  # later updates may reveal less
                shares = list(score.shares.values())
            tracks.add(histories, cohort, score.users)
            present |= set(cohort)
            advance()
            if number + 1 < rounds:
                replay = replay.after_round()
        right, false = tracks.named()
        share = right / max(len(present), 1)
        note = f"{right} of {len(present)}, {false} wrongly, {rounds} rounds"
        note += "; everybody is in every cohort" if everybody else ""
        return [
            view.finding(findings.DECODED, shares, 0.0, note=f"{wrong:,} wrong pairs" if wrong else ""),
            view.finding(findings.NAMED, Figure(share, share, share, len(present)), 0.0, note=note),
        ]


def _advantage_bound(privacy: PlainPrivacy) -> float:
    """Bound of any attacker's advantage: by (ε, δ), and by the Gaussian noise that these require."""
    if not isinstance(privacy, DifferentialPrivacy):
        return 1.0
    noise = membership.gaussian_advantage(sigma_for(privacy.epsilon, privacy.delta))
    return min(noise, membership.max_advantage(privacy.epsilon, privacy.delta))


def load_for_replay(
    path: Path, data: str | None = None, echo: Callable[[str], None] = lambda _: None
) -> tuple[Settings, Dataset]:
    """Settings and data of a run; an error that names the remedy where it cannot be replayed."""
    require_run(path)
    found = checkpoint.load_newest(RunFolder(path).checkpoints, echo)
    settings = read_settings(found.settings)
    if settings.model.reads_images:
        given = f"{path}, a run of model.kind={settings.model.kind!r} on images"
        remedy = "There are no attacks on updates of image models here, which does not mean that there are none."
        raise InvalidSettings(given, "a run of a recommender", remedy)
    if isinstance(settings.algorithm, Centralized):
        given = f"{path}, trained with all data in one place"
        raise InvalidSettings(given, "a federation's run", "Its server has everybody's data.")
    if data is None and found.data.get("name") == ON_DEVICES:
        each = "each of its users is taken to be a device of their own."
        data_file = path.absolute().parent.parent / DATA
        if not data_file.is_file():
            given = f"{path}, a federation's run, whose data lies on its devices"
            raise InvalidSettings(given, "data to replay it with", f"Name it with --data (a name or a folder); {each}")
        echo(f"Replayed with the data that {data_file} names; {each}")
        settings = settings.with_changes({"data": read_toml(data_file)})
        return settings, load_interactions(settings)[0]
    if data is None:
        loaded, _ = load_interactions(settings)
        checkpoint.require_same_data(found, loaded.fingerprint(), path)
        return settings, loaded
    known = {"data.kind": SYNTHETIC} if data == SYNTHETIC else {"data.kind": "interactions", "data.name": data}
    settings = settings.with_changes(known)
    loaded, _ = load_interactions(settings)
    items = found.data.get("items", loaded.num_items)
    if loaded.num_items != items:
        given = f"--data {data}, with {loaded.num_items:,} items"
        raise InvalidSettings(given, f"the {items:,} of {path}", "Name the data of the run.")
    return settings, loaded
