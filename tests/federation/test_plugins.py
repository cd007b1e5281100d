"""Plug-ins work wherever fairfold's own parts do; mistakes in them are reported at the start."""

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor
from typer.testing import CliRunner

import examples.plugins.fedprox_momentum
import examples.plugins.fedrolex
from examples.plugins.fedprox_momentum import FedProxMomentum
from examples.plugins.fedrolex import FedRolex, window
from fairfold.algorithms import Gradient
from fairfold.cli import app
from fairfold.config import Settings, read_settings
from fairfold.errors import InvalidSettings
from fairfold.federation import plugins
from fairfold.federation.federation import Federation, load_data, load_interactions
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round, sequential
from fairfold.federation.simulation import simulate
from fairfold.federation.updates import Update
from fairfold.flower import FairStrategy, InProcessGrid, make_client_app, node_partition
from fairfold.flower.client_store import ClientState, ClientStore, RememberedUpdate
from fairfold.subspace.blocks import KeptColumns

pytest.importorskip("flwr", reason="plug-ins are tried over Flower, too: pip install 'fairfold[flower]'")


WORLD = {"users": 24, "items": 80, "interactions_per_user": 10}
FLEET = {"capacities": "1x-2x-4x", "clients_per_round": 12}
STEPS = {"local_lr": 0.05, "server_optimizer": "sgd", "server_lr": 1.0}
ROLEX: dict[str, Any] = {
    "data": WORLD, "model": {"kind": "neumf", "factors": 4}, "subspace": {"method": "fedrolex"}, "fleet": FLEET,
    "algorithm": {"kind": "gradient"} | STEPS, "run": {"rounds": 3},
}  # fmt: skip
PROX: dict[str, Any] = {
    "data": WORLD, "model": {"factors": 4}, "fleet": FLEET, "run": {"rounds": 3},
    "algorithm": {"kind": "fedprox_momentum"} | STEPS,
}  # fmt: skip
BOTH = pytest.mark.parametrize("tables", [ROLEX, PROX], ids=["method", "algorithm"])


@pytest.mark.parametrize("example", [examples.plugins.fedrolex, examples.plugins.fedprox_momentum])
def test_an_example_is_one_short_file(example: Any) -> None:
    assert len(Path(example.__file__).read_text().splitlines()) <= 60


@BOTH
def test_simulation_moves_the_model_and_every_backend_agrees(tables: dict[str, Any]) -> None:
    found = simulate(Settings(**tables))
    oracle = simulate(Settings(**tables | {"run": {"rounds": 3, "backend": "sequential"}}))
    assert found.state.round_number == 3
    for name, vector in oracle.state.full.items():
        torch.testing.assert_close(found.state.full[name], vector, rtol=1e-5, atol=1e-6)


def test_momentum_and_pull_are_those_of_torch() -> None:
    """One user, one tensor: the update against SGD with momentum written out by hand."""
    settings = Settings(**PROX | {"fleet": {"capacities": "1x", "clients_per_round": 1}, "run": {"rounds": 1}})
    data, _ = load_data(settings)
    federation = Federation.of(settings, data)
    state = federation.initial()
    (task,) = settings.algorithm.tasks(federation.plan, state, [0])
    client = federation.clients.client(0, 0)
    update, own = settings.algorithm.client_update(federation.plan, task, client)
    (batch,) = federation.clients.training.batches(
        0, federation.clients.source(0, 0)
    )  # one step: momentum has nothing to add yet
    table, user = (
        task.vectors["item.weight"].clone().requires_grad_(),
        client.local_state["user.weight"].clone().requires_grad_(),
    )
    rows = table.view(-1, 4)[batch.items]
    loss = federation.clients.training.losses(batch, {}, [user], [rows]).mean()  # the pull is 0 where the step starts
    slope, for_user = torch.autograd.grad(loss, [table, user])
    torch.testing.assert_close(update.sums["item.weight"], -0.05 * slope)
    torch.testing.assert_close(own["user.weight"], user.detach() - 0.05 * for_user)


def test_columns_roll_and_every_one_has_its_turn() -> None:
    plan = Federation.of(Settings(**ROLEX), load_data(Settings(**ROLEX))[0]).plan
    held = []
    for number in range(4):
        small = plan.assignments(number)[2].projections
        assert small is not None
        one = small["item_mf.weight"] if "item_mf.weight" in small else next(iter(small.values()))
        assert isinstance(one, KeptColumns)
        held.append(set(one.columns(torch.device("cpu")).tolist()))
    assert set.union(*held) == {0, 1, 2, 3}
    assert all(a != b for a, b in pairwise(held))
    assert window((5, 4), 2, 3).runs == ((0, 1), (3, 4))


@BOTH
def test_over_flower_the_same_numbers(tables: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(**tables | {"fleet": FLEET | {"clients_per_round": "none"}})
    data, _ = load_interactions(settings)
    federation = Federation.of(settings, data)
    state = federation.initial()
    sizes = [str(federation.plan.capacities[int(size)]) for size in federation.sampler.size]

    def capacity(context: Any) -> str:
        return sizes[int(context.node_config["partition-id"])]

    for user in range(len(sizes)):  # devices would draw their users' first vectors by themselves
        mine = {name: rows[user][None].clone() for name, rows in federation.clients.local_state.items()}
        ClientStore(tmp_path / f"node-{user}").save(ClientState(RememberedUpdate(0, mine), user_names=[str(user)]))
    app = make_client_app(
        lambda context, _: node_partition(data, context), capacity=capacity, state=tmp_path, repeatable=True
    )
    grid = InProcessGrid(app, [{"partition-id": n, "num-partitions": len(sizes)} for n in range(len(sizes))])
    strategy = FairStrategy(settings, data.num_items)
    strategy.start(grid, ArrayRecord({name: Array(vector.numpy().copy()) for name, vector in state.full.items()}))
    rejections = Rejections()
    for _ in range(settings.run.rounds):
        state = run_round(state, federation.sampler, federation.clients, rejections, sequential)
    assert not strategy.progress.rejections.counts
    for name, vector in state.full.items():
        torch.testing.assert_close(strategy.progress.state.full[name], vector, rtol=1e-5, atol=1e-6)


@BOTH
def test_run_resume_report_recommend_export(tables: dict[str, Any], tmp_path: Path) -> None:
    """The whole way of a user's commands, with settings from a file."""
    from fairfold.runs.train import run

    whole = run(read_settings(tables), tmp_path / "whole").result
    run(read_settings(tables | {"run": {"rounds": 2}}), tmp_path / "parts")
    parts = run(read_settings(tables), tmp_path / "parts", resume=True).result
    for name, vector in whole.state.full.items():
        assert torch.equal(parts.state.full[name], vector)
    commands = CliRunner()
    for arguments in (
        ["report", str(tmp_path / "parts"), "--out", str(tmp_path / "report")],
        ["recommend", str(tmp_path / "parts"), "--user", "#0", "--top", "3"],
        ["export", str(tmp_path / "parts"), "--capacity", "2x", "--out", str(tmp_path / "device.safetensors")],
    ):
        done = commands.invoke(app, arguments)
        assert done.exit_code == 0, done.output


def test_a_class_or_a_name_is_accepted() -> None:
    assert type(Settings(algorithm=FedProxMomentum).algorithm) is FedProxMomentum
    assert type(Settings(algorithm="fedprox_momentum").algorithm) is FedProxMomentum
    assert type(Settings(model="neumf", subspace=FedRolex).subspace) is FedRolex
    assert type(Settings(model="neumf", subspace="fedrolex").subspace) is FedRolex


class Raises(Gradient):
    kind: Literal["raises"] = "raises"  # type: ignore[assignment]

    def client_update(self, *_: Any) -> Any:
        raise KeyError("nothing here")


class WrongSize(Gradient):
    kind: Literal["wrong_size"] = "wrong_size"  # type: ignore[assignment]

    def client_update(self, *given: Any) -> Any:
        update, own = super().client_update(*given)
        return Update({name: vector[:-1] for name, vector in update.sums.items()}, update.weight), own


class WrongState(Gradient):
    kind: Literal["wrong_state"] = "wrong_state"  # type: ignore[assignment]

    def server_update(self, *_: Any) -> Any:
        return None


class WrongScores(Gradient):
    kind: Literal["wrong_scores"] = "wrong_scores"  # type: ignore[assignment]

    def scorer(self, *_: Any) -> Any:
        def score(users: Tensor) -> Tensor:
            return torch.zeros(len(users), 3)

        return score


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (Raises, "client_update raised KeyError"),
        (WrongSize, "client_update"),
        (WrongState, "server_update"),
        (WrongScores, "scorer"),
    ],
)
def test_a_bad_plug_in_is_refused_before_the_first_round(kind: type[Gradient], part: str) -> None:
    with pytest.raises(InvalidSettings, match=part):
        simulate(Settings(data=WORLD, algorithm=kind))


class TooFew(FedRolex):
    method: Literal["too_few"] = "too_few"  # type: ignore[assignment]

    def divide(self, *given: Any) -> Any:
        return super().divide(*given)[:1]


def test_a_method_that_forgets_a_size_is_refused() -> None:
    gradient = {"kind": "gradient", "local_lr": 0.05}
    with pytest.raises(InvalidSettings, match="divide gave something else; needed: an Assignment per capacity, 2, not"):
        simulate(Settings(data=WORLD, model="mf", algorithm=gradient, subspace=TooFew, fleet={"capacities": "1x-4x"}))


def test_what_cannot_be_registered_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="default for 'kind'"):
        plugins.register_algorithm(object)  # type: ignore[arg-type]
