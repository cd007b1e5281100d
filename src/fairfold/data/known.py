"""The public data sets known by name: where they come from, under which terms, and which files they are."""

import os
from dataclasses import dataclass
from pathlib import Path

from fairfold.data import download
from fairfold.data.files import Stages, cache_folder, existing, silent
from fairfold.errors import InvalidData

GROUPLENS = "https://files.grouplens.org/datasets/movielens"
UCSD = "https://datarepo.eng.ucsd.edu/mcauley_group"
RESEARCH = "research only, not to be redistributed"


@dataclass(frozen=True)
class KnownSet:
    """A public data set."""

    name: str  # the name it is asked for by
    page: str  # the publisher's
    terms: str  # licence or terms of use, in short; the page has them in full
    files: tuple[str, ...]  # those that are read, once they are in a folder
    downloads: tuple[download.Remote, ...] = ()  # none where a person has to accept terms, choose or run a script
    how: str = ""  # to get the files where there is nothing to download by itself


def _movielens(name: str, files: tuple[str, ...], md5: str | None = None, published: bool = True) -> KnownSet:
    archive = f"{GROUPLENS}/{name}.zip"
    return KnownSet(
        name,
        f"https://grouplens.org/datasets/movielens/{name.removeprefix('ml-').removesuffix('-small')}/",
        RESEARCH,
        files,
        # GroupLens keeps the checksum of each stable archive beside it; the "latest" ones change and have none.
        (download.Remote(archive, md5=md5, md5_url=f"{archive}.md5" if published and md5 is None else None),),
    )


def _files(name: str, page: str, terms: str, base: str, sums: dict[str, str | None]) -> KnownSet:
    """A set of files that lie side by side, each with its checksum where that is known."""
    downloads = tuple(download.Remote(f"{base}/{file}", md5=md5) for file, md5 in sums.items())
    return KnownSet(name, page, terms, tuple(sums), downloads)


_CSV = ("ratings.csv", "movies.csv")
_DAT = ("ratings.dat", "movies.dat")
_FAIR = "https://github.com/apd10/FLCF"
_GOODREADS = "https://cseweb.ucsd.edu/~jmcauley/datasets/goodreads.html"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master"
_LIGHTGCN = "https://raw.githubusercontent.com/gusye1234/LightGCN-PyTorch/master/data/gowalla"

KNOWN = {
    known.name: known
    for known in (
        KnownSet(
            "goodreads-100", _FAIR, f"derived from UCSD Goodreads: {RESEARCH}", ("train.txt", "test.txt"),
            how="Copy train.txt and test.txt of the paper's repository, "
            "or prepare goodreads-interactions with --top-users 100.",
        ),
        KnownSet(
            "amazonproducts-100", _FAIR, f"derived from Amazon reviews: {RESEARCH}", ("train.txt", "test.txt"),
            how="Put train.txt and test.txt here (the paper's repository has test.txt alone), "
            "or prepare amazon-reviews with --top-users 100.",
        ),
        KnownSet(
            "goodreads-interactions", _GOODREADS, RESEARCH, ("goodreads_interactions.csv",),
            (download.Remote(f"{UCSD}/gdrive/goodreads/goodreads_interactions.csv"),),
        ),
        KnownSet(
            "goodreads-interactions-200k", _GOODREADS, RESEARCH, ("goodreads_interactions.csv",),
            how="Put the first 200,001 lines (head -n 200001) of goodreads_interactions.csv here.",
        ),
        KnownSet(
            "goodreads-interactions-json", _GOODREADS, RESEARCH, ("goodreads_interactions_dedup.json.gz",),
            (download.Remote(f"{UCSD}/gdrive/goodreads/goodreads_interactions_dedup.json.gz"),),
        ),
        KnownSet(
            "amazon-reviews", "https://cseweb.ucsd.edu/~jmcauley/datasets/amazon_v2/", RESEARCH,
            ("one category's ratings CSV or reviews .json.gz",),
            how="Choose a category on the page (the publisher asks for a form) and put its file here.",
        ),
        _movielens("ml-100k", ("u.data", "u.item"), md5="0e33842e24a9c977be4e0107933c0723"),
        _movielens("ml-1m", _DAT, md5="c4d9eecfca2ab87c1945afe126590906"),
        _movielens("ml-10m", _DAT),
        _movielens("ml-20m", _CSV),
        _movielens("ml-25m", _CSV),
        _movielens("ml-32m", _CSV),
        _movielens("ml-latest", _CSV, published=False),
        _movielens("ml-latest-small", _CSV, published=False),
        KnownSet(
            "book-crossing", "http://www2.informatik.uni-freiburg.de/~cziegler/BX/",
            "research, cite Ziegler et al. 2005",
            ("BX-Book-Ratings.csv", "BX-Books.csv"),
            (download.Remote("http://www2.informatik.uni-freiburg.de/~cziegler/BX/BX-CSV-Dump.zip"),),
        ),
        _files(
            "gowalla", "https://snap.stanford.edu/data/loc-gowalla.html", "not stated; the split is LightGCN's (MIT)",
            _LIGHTGCN, {"train.txt": None, "test.txt": None},
        ),
        _files(
            "mnist", "https://yann.lecun.com/exdb/mnist/", "not stated by the publisher; often given as CC BY-SA 3.0",
            _MNIST, {
                "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
                "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
                "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
            },
        ),
        _files(
            "qmnist-writers", "https://github.com/facebookresearch/qmnist", "BSD 3-clause", _QMNIST, {
                "qmnist-train-labels-idx2-int.gz": "0058f8dd561b90ffdd0f734c6a30e5e4",
                "qmnist-test-labels-idx2-int.gz": "5b5b05890a5e13444e108efe57b788aa",
            },
        ),
        KnownSet(
            "femnist", "https://github.com/TalwalkarLab/leaf", "BSD 2-clause (LEAF); NIST Special Database 19",
            ("train/*.json", "test/*.json"),
            how="Run LEAF's data/femnist/preprocess.sh and put its data/train and data/test folders here.",
        ),
    )
}  # fmt: skip


def data_folders(name: str, cache: str | Path | None = None) -> list[Path]:
    """Where the files of a known set are looked for, in this order."""
    own = os.environ.get("FAIRFOLD_DATA")
    folders = [Path(own).expanduser() / name] if own else []
    return [*folders, cache_folder(cache) / "downloads" / name]


def on_disk(name: str, cache: str | Path | None = None) -> Path | None:
    """The folder with the files of a known set, or None when they are not here."""
    return next((folder for folder in data_folders(name, cache) if folder.is_dir() and any(folder.iterdir())), None)


def resolve(source: str | Path, cache: str | Path | None = None, stages: Stages = silent) -> Path:
    """The folder or file of a source: an existing path, or a known name whose files are here or can be fetched."""
    path = existing(source)
    if path is not None:
        return path
    known = KNOWN.get(str(source))
    if known is None:
        close = ", ".join(name for name in KNOWN if str(source).lower().split("-")[0] in name)
        raise InvalidData(
            f"{str(source)[:200]} is neither a file or folder nor a known data set",
            "a path that exists, or a name from `fairfold data list`",
            f"Did you mean one of: {close}?" if close else "Check the path.",
        )
    if (folder := on_disk(known.name, cache)) is not None:
        return folder
    target = data_folders(known.name, cache)[-1]
    if not known.downloads:
        raise by_hand(known, target, "cannot be downloaded by itself")
    try:
        download.fetch_all(known.downloads, target, known.files, stages)
    except download.Unreachable as error:
        raise by_hand(known, target, f"could not be downloaded ({error})") from error
    return target


def by_hand(known: KnownSet, target: Path, why: str) -> InvalidData:
    """The error that says which files to put where."""
    urls = ", ".join(remote.url for remote in known.downloads)
    fetch = known.how or f"Get {urls} on a machine with a network (page: {known.page})"
    return InvalidData(
        f"{known.name} {why}",
        f"{', '.join(known.files)} in {target}",
        f"{fetch.rstrip('.')}. Terms: {known.terms}. FAIRFOLD_DATA may name another folder that holds {known.name}/.",
    )
