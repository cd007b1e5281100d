"""Evaluation of fitted models as tables: metrics with intervals by size, paired comparisons, and several splits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidData, InvalidSettings, did_you_mean
from fairfold.estimator.inputs import parse_options, to_frame
from fairfold.estimator.recommendations import import_pandas
from fairfold.federation.algorithm import PredictsRatings
from fairfold.federation.evaluation import Evaluator
from fairfold.federation.federation import Federation, popularity_baseline
from fairfold.federation.plan import StreamsRows
from fairfold.federation.updates import reduce_per_size
from fairfold.metrics.ranking import Estimate, Measure, measure_ranking, paired_test
from fairfold.metrics.rating import error_shares
from fairfold.metrics.tuned_baselines import tuned_scorers

if TYPE_CHECKING:
    from torch import Tensor

    from fairfold.estimator.model import Model
    from fairfold.metrics.ranking import Scorer
    from fairfold.metrics.rating import Predictor
    from fairfold.subspace.projection import Assignment
    from fairfold.typing import Weights

RATING_METRICS = ("mse", "rmse", "mae")
SERVER = "server"
Estimates = Mapping[str, Estimate]


def evaluate(model: Model, test: Any, metrics: str | Sequence[str] | None, *, baselines: bool) -> Any:
    """Write a pandas DataFrame of a row per model; see :meth:`fairfold.Model.evaluate`."""
    chosen = held_out_data(model, test)
    names = metric_names(model, metrics)
    rows = dict(estimates(model, chosen, names))
    return frame(rows | dict(baseline_estimates(model, chosen, names, strong=baselines)))


def frame(rows: Mapping[str, Estimates]) -> Any:
    """A DataFrame of a row per model: users, and each metric with half of its 95 % interval beside it."""
    table = []
    for name, found in rows.items():
        row: dict[str, Any] = {"model": name, "users": max((len(one.by_user) for one in found.values()), default=0)}
        for metric, one in found.items():
            row |= {metric: one.value, f"{metric} ±": one.half_width}
        table.append(row)
    return import_pandas().DataFrame(table).set_index("model").dropna(axis="columns", how="all")


def metric_names(model: Model, given: str | Sequence[str] | None) -> list[str]:
    """The metrics asked for, in their usual spelling; the run's own if none are."""
    run = model.run
    asked = [run.settings.metric] if given is None else [given] if isinstance(given, str) else list(given)
    if not asked:
        raise InvalidSettings("no metrics", "at least one", "Write metrics=['ndcg@10', 'recall@20'].")
    if not run.settings.predicts_ratings:
        return list(dict.fromkeys(str(Measure.parse(name, run.settings.run.top)) for name in asked))
    names = [str(name).lower() for name in asked]
    unknown = [name for name in names if name not in RATING_METRICS]
    if unknown:
        hint = did_you_mean(unknown[0], RATING_METRICS)
        remedy = "Rankings are of models without ratings: fit without recipe='ratings'."
        given_metric = f"metric {unknown[0]!r}{hint} of a model of ratings"
        raise InvalidSettings(given_metric, f"one of {', '.join(RATING_METRICS)}", remedy)
    return list(dict.fromkeys(names))


def held_out_data(model: Model, given: Any) -> Dataset:
    """The data of a model with its held-out interactions, or with given ones in their place."""
    data = model.data if given is None else replace(model.data, test=parse_test(model, given), held_out_users=None)
    if not len(data.evaluated.test):
        remedy = "Fit with split=0.7, or give interactions to find: model.evaluate(test)."
        raise InvalidData("a model without held-out interactions", "interactions to find", remedy)
    return data


def parse_test(model: Model, given: Any) -> Interactions:
    """Interactions to find, of known users and items; those that the model was trained on are left out."""
    if isinstance(given, str) or hasattr(given, "__fspath__"):
        raise InvalidData(f"test = {str(given)!r}", "interactions, not a path", "Read the file, e.g. with polars.")
    data = model.data
    table = to_frame(given, parse_options({}))
    users, items = model.user_index.numbers, model.item_index.numbers
    pairs = [(users.get(str(user)), items.get(str(item)), *rating) for user, item, *rating in table.iter_rows()]
    known = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
    columns = [torch.tensor([pair[place] for pair in known]) for place in range(table.width)]
    ratings = columns[2] if table.width == 3 and model.run.settings.predicts_ratings else None
    test = Interactions.from_pairs(columns[0].long(), columns[1].long(), data.num_users, data.num_items, ratings)
    trained = data.train.users * data.num_items + data.train.items
    test = test.where(~torch.isin(test.users * data.num_items + test.items, trained))
    counts = f"a test of {len(pairs):,} interactions, {len(known):,} of them of known users and items"
    if not len(test):
        raise InvalidData(counts, "one that the model was not trained on", "Give others, or fit with split=0.7.")
    if len(test) < len(pairs):
        left = f"{len(pairs) - len(test):,} are left out: unknown, repeated, or trained on."
        warnings.warn(f"{counts}; {left}", stacklevel=4)
    return test


def estimates(model: Model, data: Dataset, names: Sequence[str]) -> Iterator[tuple[str, Estimates]]:
    """Metrics of the server's model and of every size's, of all users where a size's model can serve them."""
    run = model.run
    federation = replace(run.federation, data=data)
    algorithm, state, assignments = run.plan.algorithm, run.progress.state, run.assignments
    evaluator = Evaluator(federation, {})
    everybody = evaluator.all_users
    yield SERVER, _measure(model, federation, names, everybody, state.full, assignments)
    sizes = zip(run.plan.capacities, assignments, reduce_per_size(state.full, assignments), strict=True)
    for size, (capacity, held, vectors) in enumerate(sizes):
        users = everybody if algorithm.serves_new_users else evaluator.members(size)
        if held.projections is None or vectors is None or not data.evaluated.test.counts_by_user[users].any():
            yield str(capacity), {}
            continue
        full = {name: projection.recover(vectors[name]) for name, projection in held.projections.items()}
        full |= StreamsRows.of(algorithm).encoding_rows(run.plan, state.full, held.projections)
        yield str(capacity), _measure(model, federation, names, users, full, [held])


def _measure(
    model: Model, federation: Federation, names: Sequence[str], users: Tensor, full: Weights, held: list[Assignment]
) -> Estimates:
    plan, clients, data = model.run.plan, federation.evaluated_clients, federation.interactions
    if model.run.settings.predicts_ratings:
        predict = PredictsRatings.of(plan.algorithm).predictor(plan, full, held, clients)
        return _measure_ratings(predict, data.test, names, users)
    return _measure_ranking(plan.algorithm.scorer(plan, full, held, clients), data, names, users)


def _measure_ranking(score: Scorer, data: Dataset, names: Sequence[str], users: Tensor) -> Estimates:
    measures, shown = [Measure.parse(name, 1) for name in names], data.evaluated
    return measure_ranking(score, shown.train, shown.test, measures, users, data.train)


def _measure_ratings(predict: Predictor, test: Interactions, names: Sequence[str], users: Tensor) -> Estimates:
    """Errors of ratings; by_user is what each user adds to the mean over all ratings."""
    test = test.where(torch.isin(test.users, users))
    assert test.ratings is not None  # checked when the training was set up
    errors = predict(test.users, test.items).detach().cpu().double() - test.ratings.double()
    mse = Estimate.of(error_shares(errors.square(), test.users))
    root = mse.value**0.5
    found = {
        "mse": mse,
        "rmse": Estimate(root, mse.half_width / (2 * root) if root else 0.0, mse.by_user),  # d√x = dx / 2√x
        "mae": Estimate.of(error_shares(errors.abs(), test.users)),
    }
    return {name: found[name] for name in names}


def baseline_estimates(
    model: Model, data: Dataset, names: Sequence[str], *, strong: bool
) -> Iterator[tuple[str, Estimates]]:
    """Metrics of popularity and, where asked for, of tuned EASE, iALS and item-kNN on the same data."""
    if model.run.settings.predicts_ratings:
        return
    everybody = torch.arange(data.evaluated.num_users)
    for name, score in popularity_baseline(data).items():
        yield name, _measure_ranking(score, data, names, everybody)
    if strong:
        top = model.run.settings.run.top
        for name, scorer in tuned_scorers(data, top):
            yield name, _measure_ranking(scorer, data, names, everybody)


def compare(first: Model, second: Model, metrics: str | Sequence[str] | None) -> Any:
    """Write a pandas DataFrame of a row per metric; see :meth:`fairfold.Model.compare`."""
    data, other = held_out_data(first, None), held_out_data(second, None)
    if held_out_ids(data) != held_out_ids(other):
        counts = [f"{one.evaluated.num_users:,}" for one in (data, other)]
        given = f"held-out interactions of {counts[0]} and of {counts[1]} users that are not the same"
        raise InvalidData(given, "the same", "Fit both on the same data with the same split, or with the same test=.")
    if first.run.settings.predicts_ratings != second.run.settings.predicts_ratings:
        raise InvalidData("a model of ratings and one of rankings", "two of a kind", "Fit both by recipes of one kind.")
    names = metric_names(first, metrics)
    of_both = [dict(estimates(model, data_, names))[SERVER] for model, data_ in ((first, data), (second, other))]
    table = []
    for name in names:
        mine, theirs = (found[name] for found in of_both)
        if not len(mine.by_user):
            raise InvalidSettings(f"metric {name!r}", "a metric with a value per user", "Compare ndcg@20, say.")
        difference, p_value = paired_test(mine.by_user, theirs.by_user)
        row = {"metric": name, "first": mine.value, "second": theirs.value, "difference": mine.value - theirs.value}
        table.append(row | {"±": difference.half_width, "p": p_value, "users": len(mine.by_user)})
    return import_pandas().DataFrame(table).set_index("metric")


def held_out_ids(data: Dataset) -> tuple[list[str], set[tuple[str, str]]]:
    """The ids of all users, in order, and those of the held-out pairs: item numbers may differ between two runs."""
    data = data.evaluated
    users = data.user_ids or [str(user) for user in range(data.num_users)]
    items = data.item_ids or [str(item) for item in range(data.num_items)]
    pairs = zip(data.test.users.tolist(), data.test.items.tolist(), strict=True)
    return users, {(users[user], items[item]) for user, item in pairs}


def cross_validate(
    interactions: Any,
    capacities: str | None = None,
    *,
    splits: int = 3,
    metrics: str | Sequence[str] | None = None,
    baselines: bool = False,
    **options: Any,
) -> Any:
    """Fit a model on each of several random splits; a pandas DataFrame of a row per split and model.

    Args:
        interactions: As for :func:`fairfold.fit`. A published split is pooled and split again.
        capacities: Sizes of the devices.
        splits: How many splits to draw, with the seeds 0, 1, ...; seeds of the runs are the same numbers.
        metrics: As for :meth:`fairfold.Model.evaluate`.
        baselines: Also EASE, iALS and item-kNN, tuned on the training part of each split.
        **options: As for :func:`fairfold.fit`.

    Example:
        >>> import fairfold
        >>> readings = [(reader, book) for reader in range(20) for book in range(reader % 5, 40, 2)]
        >>> table = fairfold.cross_validate(readings, "1x-4x", splits=2, metrics="recall@5", rounds=1, progress=False)
        >>> sorted(table.groupby("model")["recall@5"].mean().index)
        ['1x', '4x', 'popularity', 'server']
    """
    from fairfold.estimator.fitting import fit

    if splits < 1:
        raise InvalidSettings(f"splits = {splits}", "at least 1", "Draw 3, say: the spread over splits is shown.")
    if "test" in options or "seed" in options:
        raise InvalidSettings("a test or a seed for several splits", "neither", "Use fairfold.fit with test= or seed=.")
    tables = []
    for number in range(splits):
        model = fit(interactions, capacities, seed=number, split_seed=number, resplit=True, **options)
        tables.append(evaluate(model, None, metrics, baselines=baselines))
    return import_pandas().concat(tables, keys=range(splits), names=["split"])
