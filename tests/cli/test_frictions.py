"""What a newcomer types first: files with columns of any name, words that are almost right."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

import fairfold.data
from fairfold import Settings, __version__
from fairfold.config import read_settings
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.federation.plugin_check import check_plugins
from tests.support.commands import fails, works
from tests.support.own_models import BiasedMF

ROWS = [(user, item) for user in range(12) for item in range(20) if (user * item) % 3]
QUICK = ["--set", "run.baselines=false", "--set", "algorithm.tune=false", "--rounds", "1", "--capacities", "1x"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def written(header: str, name: str = "mine.csv") -> Path:
    path = Path(name)
    lines = [header] if header else []
    columns = len(header.split(",")) if header else 3
    rows = [",".join([str(user), str(100 + item), *["4"] * (columns - 2)]) for user, item in ROWS]
    path.write_text("\n".join([*lines, *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    "header",
    ["User_ID,Anime_ID,Feedback", "visitorid,itemid", "user_id,Game_ID", "user,artist", "userID,artistID,weight",
     "reader,book", "Customer ID,StockCode", "user_id,podcast_id,session_id", "user_id:token,item_id:token"],
)  # fmt: skip
def test_columns_of_many_names_are_known(header: str) -> None:
    data = fairfold.data.load(written(header))
    assert (data.num_users, data.num_items) == tuple(len(set(ids)) for ids in zip(*ROWS, strict=True))


def test_unknown_columns_are_refused_with_a_command_that_works() -> None:
    path = written("who,what,when")
    with pytest.raises(InvalidData) as refused:
        fairfold.data.load(path)
    command = re.search(r"fairfold (train --data .*?) \(in Python", str(refused.value))
    assert command is not None
    assert "--user-column who --item-column what" in command[1]
    assert "NDCG@20" in works(*shlex.split(command[1]), *QUICK, "--out", "run")
    assert "did you mean 'what'" in fails(
        "train", "--data", "mine.csv", "--user-column", "who", "--item-column", "waht"
    )


def test_a_file_without_a_header_is_read_by_places() -> None:
    path = written("")
    output = fails("train", "--data", str(path), *QUICK)
    command = re.search(r"fairfold (train --data .*?) \(in Python", output)
    assert command is not None
    works(*shlex.split(command[1]), *QUICK, "--out", "run")
    data = fairfold.data.load(path, user_column="1", item_column="2")
    assert len(data.train) + len(data.test) == len(ROWS)  # the first line is one of them


@pytest.mark.parametrize(("separator", "user"), [(",", "u"), ("\t", "u"), (",", "Ms. ")])
def test_texts_alone_without_a_header_lose_no_line(separator: str, user: str, tmp_path: Path) -> None:
    rows = [f"{user}{place % 7}{separator}the item {place % 11}" for place in range(77)]
    path = tmp_path / "texts.csv"
    path.write_text("\n".join(rows))
    output = fails("train", "--data", str(path), *QUICK)
    assert "--user-column 1 --item-column 2 (in" in output  # there is no third column to name
    data = fairfold.data.load(path, user_column="1", item_column="2")
    assert len(data.train) + len(data.test) == 77
    path.write_text("\n".join([f"klant{separator}produkt", *rows]))  # by places, too, names of columns are no ids
    data = fairfold.data.load(path, user_column="1", item_column="2")
    assert len(data.train) + len(data.test) == 77
    path.write_text("\n".join([f"My User{separator}My Favourite Item", *rows]))
    assert "--user-column 'My User' --item-column 'My Favourite Item'" in fails("train", "--data", str(path), *QUICK)


def test_train_takes_what_prepare_took_and_names_of_the_list() -> None:
    path = written("who,what,stars")
    columns = ["--user-column", "who", "--item-column", "what"]
    works("data", "prepare", str(path), *columns, "--min-rating", "3", "--core", "2")
    works("train", "--data", str(path), *columns, "--min-rating", "3", "--core", "2", *QUICK, "--out", "first")
    (folder,) = Path("cache").glob("mine-*")
    listed = works("data", "list")
    assert folder.name in listed
    works("train", "--data", folder.name, *QUICK, "--out", "second")
    written("who,what,stars", "mine.tsv").write_text(path.read_text().replace(",", "\t"))
    works("train", "--data", "mine.tsv", *columns, "--separator", "tab", *QUICK, "--out", "third")


def test_usual_ways_of_reading_leave_settings_as_they_were() -> None:
    usual = read_settings({"data": {"name": "x"}}).plain()["data"]
    assert usual.keys() == {"kind", "name", "top_users", "resplit"}
    assert read_settings({"data": {"name": "x", "core": 2}}).plain()["data"]["core"] == 2


def test_the_version() -> None:
    assert works("--version").strip() == f"fairfold {__version__}"
    asked = subprocess.run([sys.executable, "-m", "fairfold", "--version"], capture_output=True, text=True, timeout=120)
    assert asked.stdout.strip() == f"fairfold {__version__}"


@pytest.mark.parametrize(
    ("key", "wanted"),
    [("learning_rat", "algorithm.local_lr"), ("factrs", "model.factors"), ("run.round", "rounds"),
     ("algoritm.ridge", "algorithm"), ("algorithm.epochs", "algorithm.local_epochs")],
)  # fmt: skip
def test_similar_keys_are_suggested_by_the_command_and_in_python(key: str, wanted: str) -> None:
    assert f"did you mean '{wanted}'" in fails("train", "--set", f"{key}=1")
    table, _, name = key.rpartition(".")
    with pytest.raises(ValueError, match=f"did you mean '{wanted}'"):
        Settings(**({table: {name: 1}} if table else {name: 1}))


class Summed(BiasedMF):
    """A score that is one number whatever is asked for."""

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        return (users[0] * items[0]).sum()


class Matrix(BiasedMF):
    """Right for one user with many items alone."""

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        return (items[0] @ users[0].reshape(-1, users[0].shape[-1]).T)[..., 0]


class Silent(BiasedMF):
    """A combine that forgot to return."""

    def combine(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        return None  # type: ignore[return-value]


def test_a_model_that_gives_no_tensor_is_refused_with_what_it_gave() -> None:
    with pytest.raises(InvalidSettings, match="not None"):
        check_plugins(Settings(model=Silent))


@pytest.mark.parametrize("kind", [Summed, Matrix])
def test_a_model_that_does_not_broadcast_is_found_at_once(kind: type) -> None:
    with pytest.raises(InvalidSettings, match="combine"):
        check_plugins(Settings(model=kind))
    check_plugins(Settings(model=BiasedMF))
