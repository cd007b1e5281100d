"""Which values of different tables do not go together, and why."""

from typing import TYPE_CHECKING

from fairfold.algorithms.averaging import AveragingAlgorithm
from fairfold.config.fleet import DifferentialPrivacy, SecurePrivacy
from fairfold.federation.algorithm import Centralized, CombinesGroups, PrivateReleases, TrainsImages
from fairfold.methods import Fair, Truncated

if TYPE_CHECKING:
    from fairfold.config.settings import Settings


def incompatibility(settings: "Settings") -> str | None:
    """Why the tables of some settings do not go together, or None."""
    return (
        _model_problem(settings)
        or _inactive_key(settings)
        or _subspace_problem(settings)
        or _server_problem(settings)
        or _asynchronous_problem(settings)
        or _privacy_problem(settings)
    )


def _model_problem(settings: "Settings") -> str | None:
    images = settings.model.reads_images
    with_model = f"with model.kind={settings.model.kind!r}"
    if isinstance(settings.algorithm, TrainsImages) != images:
        wanted = "'images'" if images else "one for recommenders"
        return f"algorithm.kind={settings.algorithm.kind!r} {with_model}: use {wanted}"
    if (settings.data.kind == "images") != images:
        wanted = "name images, e.g. --data mnist" if images else "use model.kind='mlp' or 'lenet'"
        return f"data of kind {settings.data.kind!r} {with_model}: {wanted}"
    if settings.model.dropout and isinstance(settings.algorithm, Centralized):
        return "model.dropout where all data is in one place: it is clients that draw what they drop; use 0"
    return None


def _inactive_key(settings: "Settings") -> str | None:
    for table, key in (key.split(".") for key in settings.inactive_keys()):
        if key not in getattr(settings, table).model_fields_set:
            continue
        why = f"where the quality is {settings.metric}"
        if table == "privacy":
            why = f"with algorithm.kind={settings.algorithm.kind!r}"
        elif isinstance(settings.privacy, DifferentialPrivacy):
            why = f"with privacy.level={settings.privacy.level!r}"
        elif table == "run":
            why = f"with model.kind={settings.model.kind!r} and algorithm.kind={settings.algorithm.kind!r}, {why}"
        return f"inactive key '{table}.{key}' {why}"
    return None


def _subspace_problem(settings: "Settings") -> str | None:
    method = settings.subspace
    counts_rows = isinstance(method, Truncated)
    if isinstance(method, Fair):
        counts_rows = bool(method.support or method.reference_factors)
        if method.compress == "model" and not settings.model.reads_images:
            return "subspace.compress='model' is for models of images: use 'tables' or 'all'"
        if method.start == "subspace" and not settings.model.reads_images:
            return "subspace.start='subspace' is for models of images: tables start small anyway"
    if counts_rows and (settings.model.kind not in ("mf", "neumf") or settings.model.depth > 1):
        counted = "subspace.support and subspace.reference_factors count rows of model.factors numbers"
        deep = f" with model.depth={settings.model.depth}" if settings.model.depth > 1 else ""
        return f"{counted}: use model.kind='mf' or 'neumf' with model.depth=1, not {settings.model.kind!r}{deep}"
    return None


def _server_problem(settings: "Settings") -> str | None:
    if not isinstance(settings.algorithm, AveragingAlgorithm) or settings.algorithm.step_per == "round":
        return None
    if settings.fleet.clients_per_round is None:
        return "algorithm.step_per='client' needs a number of fleet.clients_per_round"
    if not settings.fleet.asynchronous.is_synchronous:
        return "fleet.asynchronous with algorithm.step_per='client': the number of updates is not known before a step"
    return None


def _asynchronous_problem(settings: "Settings") -> str | None:
    fleet, algorithm, privacy = settings.fleet, settings.algorithm, settings.privacy
    synchronous = fleet.asynchronous.is_synchronous
    if isinstance(algorithm, Centralized) and not (synchronous and fleet.latency.median_seconds is None):
        return "fleet.asynchronous and fleet.latency where all data is in one place: there are no clients to wait for"
    if synchronous:
        return None
    if fleet.replacement:
        return "fleet.asynchronous with fleet.replacement: a client works on one task at a time"
    if privacy.uses_secure_aggregation:
        level = f"privacy.level={privacy.level!r}"
        return f"fleet.asynchronous with {level}: masks cancel in the sum over a whole cohort, for which rounds wait"
    return None


def _privacy_problem(settings: "Settings") -> str | None:
    """Why updates that the server sees only in sums do not go with the other tables, or None."""
    privacy = settings.privacy
    level = f"privacy.level={privacy.level!r}"
    if settings.fleet.secure_groups > 1:
        if isinstance(privacy, DifferentialPrivacy) or not isinstance(privacy, SecurePrivacy):
            return f"fleet.secure_groups={settings.fleet.secure_groups} needs privacy.level='secure', not {level}"
        if not isinstance(settings.algorithm, CombinesGroups):
            kind = f"algorithm.kind={settings.algorithm.kind!r}"
            return f"fleet.secure_groups={settings.fleet.secure_groups} with {kind}, which has no rule for them: use 1"
    if not isinstance(privacy, SecurePrivacy):
        return None
    if isinstance(settings.algorithm, Centralized):
        return f"{level} where all data is in one place: there is nothing to hide in a sum"
    if not settings.subspace.additive:
        return f"{level} with subspace.method={settings.subspace.method!r}, whose updates are not additive: use another"
    if isinstance(privacy, DifferentialPrivacy) and not isinstance(settings.algorithm, PrivateReleases):
        from fairfold.config.settings import algorithms

        able = ", ".join(repr(name) for name, kind in algorithms().items() if issubclass(kind, PrivateReleases))
        return f"{level} with algorithm.kind={settings.algorithm.kind!r}: what can be private is {able}"
    if settings.fleet.replacement:
        return f"{level} with fleet.replacement: a client takes part once in a sum"
    drawn = settings.fleet.clients_per_round
    given = "clients_per_round" in settings.fleet.model_fields_set  # a client does not know the fleet's
    groups = settings.fleet.secure_groups
    if given and drawn is not None and drawn < privacy.fewest_clients(settings.fleet):
        asked = f"privacy.min_cohort={privacy.min_cohort} with fleet.clients_per_round={drawn}"
        if groups > 1:
            return f"{asked} in {groups} groups: ask all clients (--set fleet.clients_per_round=none)"
        lower = f", or take sums that hide less (--set privacy.min_cohort={drawn})" * (drawn > 1)
        return f"{asked}: ask all clients (--set fleet.clients_per_round=none){lower}"
    return None
