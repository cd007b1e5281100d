"""The fair table: ranks against a brute force, the split by time, and baselines against plain loops of torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import fedrec
from experiments.baselines import FedMF, FedNCF
from experiments.combine import unpack_per_user
from experiments.execute import execute_all
from experiments.experiment import Cell, read_experiment
from experiments.fedrec import leave_newest_out
from experiments.figures import figures
from experiments.leave_one_out import leave_one_out_ranks
from experiments.output import paired_differences, paired_views
from experiments.records import Outcome, Watcher
from experiments.tables import result_tables
from fairfold.backends.batched import batched
from fairfold.config import read_settings
from fairfold.data.interactions import Dataset, Interactions
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.federation.algorithm import COUNTS
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import Backend, run_round, sequential
from fairfold.federation.updates import Aggregate, State
from fairfold.metrics.ranking_baselines import BinaryMatrix, Ease

ITEMS, USERS = 40, 12


def small(seed: int = 0) -> Dataset:
    """Random histories, with one item of each user as test and another as validation."""
    order = torch.rand(USERS, ITEMS, generator=torch.Generator().manual_seed(seed)).argsort(1)
    lengths = 3 + torch.arange(USERS) % 7

    def part(first: int, many: torch.Tensor) -> Interactions:
        users = torch.repeat_interleave(torch.arange(USERS), many)
        items = torch.cat([order[user, first : first + int(many[user])] for user in range(USERS)])
        return Interactions.from_pairs(users, items, USERS, ITEMS)

    one = torch.ones(USERS, dtype=torch.int64)
    ids = [str(number) for number in range(ITEMS)]
    return Dataset("small", part(2, lengths), part(0, one), user_ids=ids[:USERS], item_ids=ids, valid=part(1, one))


def baseline_federation(kind: str, data: Dataset, capacities: str = "1x", **keys: float) -> Federation:
    """A federation of a baseline."""
    subspace = "heterofl" if kind == "hetefedrec" else "fedavg"
    return Federation.of(
        read_settings(
            {
                "data": {"kind": "interactions", "name": "small"},
                "model": {"kind": "mf", "factors": 4},
                "algorithm": {"kind": kind} | keys,
                "subspace": {"method": subspace},
                "fleet": {"capacities": capacities, "clients_per_round": None},
                "run": {"rounds": 3},
            }
        ),
        data,
    )


def after(world: Federation, backend: Backend, rounds: int = 2) -> State:
    """The server's state after some rounds."""
    state = world.initial()
    for _ in range(rounds):
        state = run_round(state, world.sampler, world.clients, Rejections(), backend)
    return state


SIZES = [
    ("fedmf", "1x"),
    ("fedncf", "1x"),
    ("pfedrec", "1x"),
    ("fedrap", "1x"),
    ("colr", "1x"),
    ("fedrecon", "1x"),
    ("lightfr", "1x"),
    ("hetefedrec", "1x-2x-4x"),
]


@pytest.mark.parametrize(("kind", "capacities"), SIZES)
def test_updates_of_many_clients_at_once_are_those_of_each_alone(kind: str, capacities: str) -> None:
    data = small()
    keys = {"server_optimizer": "sgd", "server_lr": 1.0}  # Adam would magnify the last digit
    alone, together = (baseline_federation(kind, data, capacities, **keys) for _ in range(2))  # type: ignore[arg-type]
    one, other = after(alone, sequential), after(together, batched)
    for name, vector in one.full.items():
        torch.testing.assert_close(other.full[name], vector, rtol=1e-4, atol=1e-6)
        assert not torch.equal(vector, baseline_federation(kind, data, capacities).initial().full[name])
    for name, mine in alone.clients.local_state.items():
        torch.testing.assert_close(together.clients.local_state[name], mine, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "capacities"), SIZES)
def test_everybody_gets_finite_scores_of_all_items(kind: str, capacities: str) -> None:
    world = baseline_federation(kind, small(), capacities)
    scores = fedrec._by_size(world, after(world, batched))(torch.tensor([0, 5, 11]))
    assert scores.shape == (3, ITEMS)
    assert bool(scores.isfinite().all())
    assert float(scores.std(1).max()) > 0


def test_fedmf_is_gradient_descent_on_the_logistic_loss() -> None:
    """Against a loop of torch.optim over one user's samples."""
    data = small()
    world = baseline_federation("fedmf", data, local_epochs=2, local_lr=0.5, item_lr=0.1)
    state, user = world.initial(), 3
    algorithm = world.plan.algorithm
    assert isinstance(algorithm, FedMF)
    (task,) = algorithm.tasks(world.plan, state, [0])
    samples = list(algorithm.draw(world.clients, [user], 0, torch.device("cpu")))
    table = state.full["item"].view(ITEMS, 4).clone().requires_grad_()
    mine = world.clients.local_state["user"][user].clone().requires_grad_()
    for of_step in samples:
        labels, items = of_step.labels[0], of_step.items[0]
        assert labels[: len(data.train.of(user))].eq(1).all()
        assert labels[len(data.train.of(user)) :].eq(0).all()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(table[items] @ mine, labels)
        steps = torch.optim.SGD([{"params": [table], "lr": 0.1 * len(items)}, {"params": [mine], "lr": 0.5}])
        steps.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        steps.step()
    update, own = algorithm.client_update(world.plan, task, world.clients.client(user, 0))
    torch.testing.assert_close(update.sums["item"].view(ITEMS, 4), table.detach() - state.full["item"].view(ITEMS, 4))
    torch.testing.assert_close(own["user"], mine.detach())


def test_fedncf_is_a_product_beside_a_perceptron_whose_layers_go_slower() -> None:
    """Scores and one device's steps against modules of torch, and the server's step against plain arithmetic."""
    data = small()
    keys = {"server_optimizer": "sgd", "server_lr": 0.5}
    world = baseline_federation("fedncf", data, local_epochs=2, local_lr=0.5, item_lr=0.1, layers=0.2, **keys)  # type: ignore[arg-type]
    state, user, algorithm = world.initial(), 3, world.plan.algorithm
    assert isinstance(algorithm, FedNCF)
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)]
    for name, layer in zip(("first", "second", "third"), layers, strict=True):
        both = state.full[name].view(layer.out_features, layer.in_features + 1)
        layer.weight.data, layer.bias.data = both[:, :-1].clone(), both[:, -1].clone()
    perceptron = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    product = torch.nn.Parameter(1 + state.full["product"])
    table = torch.nn.Parameter(state.full["item"].view(ITEMS, 4).clone())
    mine = torch.nn.Parameter(world.clients.local_state["user"][user].clone())

    def scores(items: Tensor) -> Tensor:
        read = torch.cat([mine[2:].expand(len(items), 2), table[items, 2:]], dim=1)
        found: Tensor = (table[items, :2] * mine[:2]) @ product + perceptron(read)[:, 0]
        return found

    world.clients.local_state["user"][user] = mine.detach()
    everything = torch.arange(ITEMS)
    scorer = fedrec._by_size(world, state)
    torch.testing.assert_close(scorer(torch.tensor([user]))[0], scores(everything).detach())
    for of_step in algorithm.draw(world.clients, [user], 0, torch.device("cpu")):
        labels, items = of_step.labels[0], of_step.items[0]
        groups = [([table], 0.1 * len(items)), ([mine, product, *perceptron.parameters()], 0.5)]
        steps = torch.optim.SGD([{"params": params, "lr": step} for params, step in groups])
        torch.nn.functional.binary_cross_entropy_with_logits(scores(items), labels).backward()  # type: ignore[no-untyped-call]
        steps.step()
        steps.zero_grad()
    (task,) = algorithm.tasks(world.plan, state, [0])
    update, own = algorithm.client_update(world.plan, task, world.clients.client(user, 0))
    torch.testing.assert_close(own["user"], mine.detach())
    torch.testing.assert_close(update.sums["item"], table.detach().flatten() - state.full["item"])
    torch.testing.assert_close(update.sums["product"], product.detach() - 1 - state.full["product"])
    change = torch.cat([layers[0].weight, layers[0].bias[:, None]], dim=1).detach().flatten() - state.full["first"]
    torch.testing.assert_close(update.sums["first"], change)
    before, aggregate = {name: of.clone() for name, of in state.full.items()}, Aggregate()
    aggregate.add(task, update)
    after_it = algorithm.server_update(world.plan, state, aggregate)
    torch.testing.assert_close(after_it.full["first"], before["first"] + 0.2 * 0.5 * change)
    torch.testing.assert_close(after_it.full["item"], before["item"] + 0.5 * update.sums["item"])


def test_what_colr_sends_spans_as_many_directions_as_its_rank() -> None:
    world = baseline_federation("colr", small(), rank=2, server_optimizer="sgd", server_lr=1.0)  # type: ignore[arg-type]
    before = world.initial().full["item"]
    change = (after(world, batched, rounds=1).full["item"] - before).view(ITEMS, 4)
    assert int(torch.linalg.matrix_rank(change, rtol=1e-4)) == 2
    assert world.plan.algorithm.traffic(world.plan, 0) == (ITEMS * 4 * 4, ITEMS * 2 * 4)


def test_small_devices_of_hetefedrec_move_their_columns_alone() -> None:
    world = baseline_federation("hetefedrec", small(), "4x", server_optimizer="sgd", distil=0.0)  # type: ignore[arg-type]
    before = world.initial().full["item"].view(ITEMS, 4)
    moved = (after(world, batched, rounds=1).full["item"].view(ITEMS, 4) - before).abs().sum(0) > 0
    assert moved.tolist() == [True, False, False, False]


def test_a_device_of_lightfr_receives_signs_and_moves_numbers() -> None:
    world = baseline_federation("lightfr", small())
    (task,) = world.plan.algorithm.tasks(world.plan, world.initial(), [0])
    assert set(task.vectors["item"].tolist()) == {-1.0, 1.0}
    assert world.plan.algorithm.traffic(world.plan, 0) == (ITEMS * 4 // 8, ITEMS * 4 * 4)
    state = after(world, batched)
    assert float(state.full["item"].abs().max()) <= 1
    scores = fedrec._by_size(world, state)(torch.arange(USERS))
    assert set((scores * 4**0.5).round().int().flatten().tolist()) <= {-4, -2, 0, 2, 4}


def test_fedrecon_needs_nothing_of_the_user_but_their_items() -> None:
    data, found = small(), []
    for spread in (0.0, 5.0):
        world = baseline_federation("fedrecon", data, server_optimizer="sgd")  # type: ignore[arg-type]
        state = world.initial()
        world.clients.local_state["user"].fill_(spread)
        found.append(run_round(state, world.sampler, world.clients, Rejections(), batched).full["item"])
    assert torch.equal(*found)


def test_negatives_from_outside_all_ratings_never_name_the_test_item() -> None:
    data = small()
    for outside, named in ((data.train, True), (fedrec._joined(data.train, data.test), False)):
        world = baseline_federation("fedmf", data, local_epochs=200)
        world.clients.outside = outside
        drawn = torch.cat([of.items[0] for of in world.plan.algorithm.draw(world.clients, [0], 0, torch.device("cpu"))])  # type: ignore[attr-defined]
        assert bool((drawn == data.test.of(0)).any()) == named


def test_ranks_are_those_of_a_brute_force() -> None:
    data = small()
    scores = torch.rand(USERS, ITEMS, generator=torch.Generator().manual_seed(1)).mul(10).round()  # with ties
    found = leave_one_out_ranks(lambda users: scores[users], data.train, data.test)
    for user in range(USERS):
        wanted, known = int(data.test.of(user)), set(data.train.of(user).tolist())
        others = [item for item in range(ITEMS) if item not in known and item != wanted]
        assert int(found.everywhere[user]) == 1 + sum(scores[user, item] >= scores[user, wanted] for item in others)
        assert 1 <= int(found.sampled[user]) <= 100
    assert float(found.gains(1)[1].sum()) == float(found.hits(1)[1].sum())


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_scores_that_are_all_alike_or_no_numbers_find_nothing(value: float) -> None:
    data = small()
    hits = leave_one_out_ranks(lambda users: torch.full((len(users), ITEMS), value), data.train, data.test).hits()
    assert float(hits[0].sum()) == float(hits[1].sum()) == 0


def test_several_items_of_a_user_are_refused() -> None:
    data = small()
    with pytest.raises(InvalidData, match="one item per user"):
        leave_one_out_ranks(lambda users: torch.zeros(len(users), ITEMS), data.test, data.train)


def test_the_newest_item_is_the_test_and_the_one_before_validates(tmp_path: Path) -> None:
    rows = [
        (7, 10, 5, 100),
        (7, 11, 3, 300),
        (7, 12, 1, 200),
        (7, 13, 2, 50),
        (9, 10, 4, 5),
        (9, 13, 4, 6),
        (9, 11, 4, 6),
    ]
    rows.append((5, 10, 1, 1))  # too short to be split
    (tmp_path / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    data = leave_newest_out(str(tmp_path))
    assert data.valid is not None
    numbers = {10: 0, 13: 1, 11: 2, 12: 3}  # by how often each is in train, then by number
    assert data.num_users == 2
    names = {place: name for name, place in numbers.items()}
    assert [names[int(item)] for item in data.test.items] == [11, 11]
    assert [names[int(item)] for item in data.valid.items] == [12, 13]


def test_a_cell_of_every_kind_of_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedrec, "leave_newest_out", lambda _name: small())
    for method in ("popularity", "EASE", "counter", "fedmf", "ours"):
        progress: list[tuple[int, int]] = []
        given = fedrec.FedRecSettings(method, rounds=2, factors=4)
        facts, by_user = fedrec.measured(given, 0, {}, lambda done, of, progress=progress: progress.append((done, of)))  # type: ignore[misc]
        assert set(fedrec.MEASURES) <= facts["measures"].keys()
        for name in fedrec.MEASURES:
            assert unpack_per_user(by_user[name]).mean() == pytest.approx(facts["measures"][name], abs=1e-4)
        assert method != "fedmf" or progress[-1] == (2, 2)


def test_settings_are_those_of_the_best_trial_however_negatives_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedrec, "leave_newest_out", lambda _name: small())
    values: dict[str, Any] = {
        "method": "fedmf",
        "rounds": 2,
        "search_rounds": 3,
        "check_every": 2,
        "factors": 4,
        "tried": {"server_lr": [0.1, 0.3]},
        "also": [{"server_lr": 1.0}],
    }
    trials = fedrec.trial_settings(values)
    assert trials == fedrec.trial_settings(values | {"outside": "all ratings"})
    assert [of["trial"] for of in trials.values()] == [{"server_lr": step} for step in (0.1, 0.3, 1.0)]
    found = {name: fedrec.tried(fedrec.FedRecSettings(**of), lambda _done, _of: None) for name, of in trials.items()}
    assert all([rounds for rounds, _ in curve] == [2, 3] for curve in found.values())
    assert all(0 <= value <= 1 for curve in found.values() for _, value in curve)
    for best in (0.1, 0.3, 1.0):
        reached = {name: (1.0, float(of["trial"]["server_lr"] == best)) for name, of in trials.items()}
        facts, _ = fedrec.measured(fedrec.FedRecSettings(**values), 0, reached, lambda _done, _of: None)
        assert facts["chosen"] == {"server_lr": best, "rounds": 1}
        assert facts["measures"]["rounds"] == 1
    assert fedrec.trial_settings(values | {"search_rounds": 0}) == {}


def test_a_trial_that_diverges_is_the_worst_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedrec, "leave_newest_out", lambda _name: small())
    given = fedrec.FedRecSettings("fedncf", rounds=4, check_every=1, factors=4, trial={"server_lr": 1e38})
    assert fedrec.tried(given, lambda _done, _of: None) == [(4.0, 0.0)]
    facts, _ = fedrec.measured(replace(given, tried={"server_lr": [1e38]}), 0, {}, lambda _done, _of: None)
    assert facts["measures"]["rounds"] < 4  # and a cell has what it had before
    assert 0 <= facts["measures"]["NDCG@10"] <= 1


def test_central_baselines_are_tuned_on_the_same_items_as_federated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of the values is the one that finds the items before the newest."""
    data = small()
    assert data.valid is not None
    monkeypatch.setattr(fedrec, "leave_newest_out", lambda _name: data)
    given = fedrec.FedRecSettings("EASE", also=[{"penalty": 9000.0}])
    facts, _ = fedrec.measured(given, 0, {}, lambda _done, _of: None)
    reached = facts["tried on held-out items"]
    for penalty in (10.0, 3000.0, 9000.0):
        score = Ease(BinaryMatrix(data.train), penalty)
        expected = float(leave_one_out_ranks(score, data.train, data.valid).gains()[1].mean())
        assert reached[f"penalty {penalty:g}"] == pytest.approx(expected, abs=1e-6)
    assert facts["chosen"]["settings"] == max(reached, key=reached.__getitem__)


def test_an_order_from_some_users_knows_their_counts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds, data = list[Federation](), small()

    class Seen(Federation):
        def initial(self, storage: Any = None) -> State:
            worlds.append(self)
            return super().initial(storage)

    monkeypatch.setattr(fedrec, "leave_newest_out", lambda _name: data)
    monkeypatch.setattr(fedrec, "Federation", Seen)
    for share in (1.0, 0.5):
        fedrec.measured(fedrec.FedRecSettings("ours", order_from=share), 0, {}, lambda _done, _of: None)
    everybody, half = (world.plan.public.statistics[COUNTS] for world in worlds)
    assert everybody.sum() == len(data.train) + USERS  # the validation item is trained on
    assert half.tolist() == sorted(half.tolist(), reverse=True)
    assert bool((half % 2 == 0).all())  # each of the six stands for two
    assert half.tolist() != sorted(everybody.tolist(), reverse=True)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"one of .*fedmf"):
        fedrec.FedRecSettings("fedmff")


def test_tables_like_another_have_its_rows(tmp_path: Path) -> None:
    tables = read_experiment("fedrec").file.tables
    assert tables["ml-1m"].rows == tables["ml-100k"].rows
    assert tables["ml-1m-leak"].rows == tables["ml-100k-leak"].rows != tables["ml-1m"].rows
    (tmp_path / "mine.toml").write_text('title = "t"\n[tables.a]\ntitle = "a"\nlike = "b"\n')
    with pytest.raises(InvalidSettings, match="like 'b'"):
        read_experiment(str(tmp_path / "mine.toml"))


def test_what_a_row_did_not_measure_is_left_open() -> None:
    experiment = read_experiment("fedrec")
    cells = [cell for cell in experiment.cells if (cell.table, cell.row) == ("ml-100k", "popularity")]
    facts = {"measures": {"NDCG@10": 0.25}, "errors": {"NDCG@10": 0.01}}
    outcome = Outcome.of_value(0.25, 0.0, facts=facts)
    found = result_tables(experiment, dict.fromkeys(cells, outcome))[0].entries
    entries = {entry.column: entry for entry in found if entry.row == "popularity"}
    assert (entries["NDCG@10"].mean, entries["NDCG@10"].spread) == (0.25, 0.01)
    assert entries["bytes held"].mean is None


def test_trials_are_run_once_for_all_seeds_and_both_ways_to_draw(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(0)
    folder = tmp_path / "u.data"
    rows = [(user, item, 1, time) for user in range(14) for time, item in enumerate(drawn(source))]
    folder.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    (tmp_path / "mine.toml").write_text(f"""
title = "t"
seeds = [0, 1]
set = {{ kind = "fedrec", data = "{folder}", rounds = 2, search_rounds = 1, factors = 4, clients = 14 }}
[tables.honest]
title = "honest"
metric = "NDCG@10"
value = "last"
measures = ["HR@10", "NDCG@10"]
against = ["popularity"]
[tables.honest.rows]
popularity = {{ method = "popularity" }}
FedMF = {{ method = "fedmf", tried = {{ server_lr = [0.1, 0.3] }} }}
[tables.leak]
title = "leak"
like = "honest"
against = ["honest/*", "honest/popularity", "honest/*/HR@10"]
set = {{ outside = "all ratings" }}
rows = {{ FedMF = {{ method = "fedmf", tried = {{ server_lr = [0.1, 0.3] }} }} }}
""")
    experiment, run = read_experiment(str(tmp_path / "mine.toml")), list[str]()

    class Watching(Watcher):
        def on_cell(self, cell: Cell, outcome: Outcome) -> None:
            assert outcome.state == "done"
            run.append(cell.label)

    (found,) = execute_all([experiment], tmp_path, 1, Watching())
    assert len(run) == 2 + 2 + 2 + 2  # trials, popularity, both ways to draw
    assert [label for label in run if "server_lr" in label] == [
        f"honest FedMF server_lr {step} seed 0" for step in (0.1, 0.3)
    ]
    trials = {cell: outcome for cell, outcome in found.items() if cell.is_trial and cell.table == "leak"}
    for cell, outcome in trials.items():
        assert outcome.facts["metric"] == "NDCG@10, held out"
        given = fedrec.FedRecSettings(**cell.values)
        assert list(outcome.curve) == fedrec.tried(given, lambda _done, _of: None)  # of its own settings, not of others
    tried = {cell.column: (outcome.best_round, outcome.best) for cell, outcome in trials.items()}
    for cell, outcome in found.items():
        if cell.row == "FedMF" and not cell.is_trial:
            assert outcome.facts["tried on held-out items"] == tried
            best = max(tried, key=lambda name: tried[name][1] or 0.0)
            assert f"server_lr {outcome.facts['chosen']['server_lr']:g}" == best
    honest, leak = result_tables(experiment, found)
    (axes,) = figures(honest)["compared"].axes  # of its metric alone: two rows
    assert [text.get_text() for text in axes.get_yticklabels()] == ["popularity NDCG@10", "FedMF NDCG@10"]
    assert [(entry.row, entry.column) for entry in honest.entries][:2] == [
        ("popularity", "HR@10"),
        ("popularity", "NDCG@10"),
    ]
    ((name, apart),) = paired_differences(honest)
    assert (name, set(apart)) == ("popularity", {("FedMF", "HR@10"), ("FedMF", "NDCG@10")})
    both = {grid.name: grid for grid in (honest, leak)}
    values = {(name, of.row, of.column): of.mean or 0.0 for name, grid in both.items() for of in grid.entries}
    beside = dict(paired_differences(leak))  # rows of the other table
    others = {"honest/*": ("FedMF", "NDCG@10"), "honest/popularity": ("popularity", "NDCG@10")}
    for name, other in (others | {"honest/*/HR@10": ("FedMF", "HR@10")}).items():
        expected = values["leak", "FedMF", "NDCG@10"] - values["honest", *other]
        assert beside[name]["FedMF", "NDCG@10"].mean == pytest.approx(expected, abs=1e-4)
    assert [" the same row of honest," in view.about for view in paired_views(leak)] == [True, False, True]
    run.clear()
    execute_all([experiment], tmp_path, 1, Watching())
    assert run == []


def drawn(source: torch.Generator) -> list[int]:
    """Some items of a user, in time."""
    return torch.randperm(30, generator=source)[:8].tolist()


def test_ours_may_be_asked_for_sums_under_masks() -> None:
    for given in (fedrec.FedRecSettings("ours"), fedrec.FedRecSettings("ours", level="secure")):
        assert fedrec.run_settings(given, {}, 0, 1, 50).privacy.level == given.level
