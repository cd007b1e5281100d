"""Downloads show progress, resume, and are checked; without a network the message says which file to put where."""

import hashlib
import http.server
import io
import threading
import urllib.error
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fairfold.data import download as known
from fairfold.data.download import Remote, Unreachable, fetch, fetch_all
from fairfold.errors import InvalidData


@dataclass
class Server:
    """What a test server gives: files, and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    break_after: int | None = None
    tag: str = '"1"'
    asked: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = state.files.get(self.path.strip("/"))
            wanted = self.headers.get("Range", "")
            state.asked.append(wanted)
            if content is None:
                self.send_error(404)
                return
            start = 0
            if wanted and state.ranges and self.headers.get("If-Range") == state.tag:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
            body = content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", state.tag)
            self.end_headers()
            self.wfile.write(body if state.break_after is None else body[: state.break_after])

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        state.url = f"http://127.0.0.1:{httpd.server_address[1]}"
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield state
        httpd.shutdown()
        thread.join()


CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


def test_a_whole_file(server: Server, tmp_path: Path) -> None:
    server.files["a.bin"] = CONTENT
    assert fetch(Remote(f"{server.url}/a.bin", MD5), tmp_path / "a.bin").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    fetch(Remote(f"{server.url}/a.bin", MD5), tmp_path / "a.bin")
    assert len(server.asked) == 1  # what is here is not asked for again


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on_where_it_stopped(ranges: bool, server: Server, tmp_path: Path) -> None:
    server.files["a.bin"] = CONTENT
    server.break_after = 300_000
    with pytest.raises(Unreachable, match=r"300,000 of 1,024,000 bytes|run it again|IncompleteRead"):
        fetch(Remote(f"{server.url}/a.bin", MD5), tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()
    server.break_after, server.ranges = None, ranges
    assert fetch(Remote(f"{server.url}/a.bin", MD5), tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.asked == ["", "bytes=300000-"]


@pytest.mark.parametrize("tag", ['"2"', 'W/"1"'])
def test_a_file_that_changed_meanwhile_starts_over(tag: str, server: Server, tmp_path: Path) -> None:
    server.files["a.bin"], server.break_after = CONTENT, 300_000
    server.tag = tag if tag.startswith("W/") else '"1"'
    with pytest.raises(Unreachable):
        fetch(Remote(f"{server.url}/a.bin"), tmp_path / "a.bin")
    server.files["a.bin"], server.break_after, server.tag = CONTENT[::-1], None, '"2"'
    assert fetch(Remote(f"{server.url}/a.bin"), tmp_path / "a.bin").read_bytes() == CONTENT[::-1]


def test_a_part_that_is_whole_or_too_long_starts_over(server: Server, tmp_path: Path) -> None:
    server.files["a.bin"] = CONTENT
    (tmp_path / "a.bin.part").write_bytes(CONTENT + b"more")
    (tmp_path / "a.bin.part.state").write_text(server.tag)
    assert fetch(Remote(f"{server.url}/a.bin", MD5), tmp_path / "a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("where", ["pinned", "published"])
def test_a_wrong_checksum_is_an_error_and_leaves_nothing(where: str, server: Server, tmp_path: Path) -> None:
    server.files |= {"a.zip": CONTENT, "a.zip.md5": f"MD5 (a.zip) = {'0' * 32}\n".encode()}
    url = f"{server.url}/a.zip"
    remote = Remote(url, "0" * 32) if where == "pinned" else Remote(url, md5_url=f"{url}.md5")
    with pytest.raises(InvalidData, match=MD5):
        fetch(remote, tmp_path / "a.zip")
    assert not list(tmp_path.iterdir())


def test_archives_are_unpacked_and_checksums_recorded(server: Server, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("ml/ratings.dat", "ml/README", "ml/other.py", "../../movies.dat"):
            archive.writestr(name, name)
    content = packed.getvalue()
    server.files |= {"ml.zip": content, "ml.zip.md5": hashlib.md5(content).hexdigest().encode()}
    remote = Remote(f"{server.url}/ml.zip", md5_url=f"{server.url}/ml.zip.md5")
    fetch_all((remote,), tmp_path / "downloads" / "ml", ("ratings.dat", "movies.dat"))
    folder = tmp_path / "downloads" / "ml"
    assert {path.name for path in folder.iterdir()} == {"ratings.dat", "movies.dat", "README", "checksums.json"}
    assert hashlib.sha256(content).hexdigest() in (folder / "checksums.json").read_text()
    assert [path.name for path in folder.parent.iterdir()] == ["ml"]


def test_a_known_set_is_fetched_once_and_prepared(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fairfold.data import load

    server.files |= {"train.txt": b"0 1 2\n1 0\n", "test.txt": b"0 0\n1 1\n"}
    remotes = tuple(Remote(f"{server.url}/{name}") for name in ("train.txt", "test.txt"))
    entry = known.PublicDataset("tiny", "page", "terms", ("train.txt", "test.txt"), remotes)
    monkeypatch.setitem(known.PUBLIC_DATASETS, "tiny", entry)
    assert len(load("tiny").train) == 3
    assert len(load("tiny").train) == 3
    assert len(server.asked) == 2
    assert known.local_folder("tiny") == cache / "downloads" / "tiny"


def test_without_a_network_the_message_says_which_file_to_put_where(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.delenv("FAIRFOLD_DATA", raising=False)
    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(InvalidData, match=r"no network.*ratings\.dat, movies\.dat in .*downloads/ml-1m") as caught:
        known.resolve("ml-1m")
    assert "https://files.grouplens.org/datasets/movielens/ml-1m.zip" in str(caught.value)
    with pytest.raises(InvalidData, match=r"preprocess\.sh"):
        known.resolve("femnist")
    target = cache / "downloads" / "ml-1m"
    target.mkdir(parents=True)
    (target / "ratings.dat").write_text("1::1::5::1\n")
    assert known.resolve("ml-1m") == target


def test_a_missing_file_on_the_server(server: Server, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="Not Found"):
        fetch(Remote(f"{server.url}/nothing"), tmp_path / "nothing")


def test_a_folder_of_ones_own_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gowalla").mkdir()
    (tmp_path / "gowalla" / "train.txt").write_text("0 1\n")
    monkeypatch.setenv("FAIRFOLD_DATA", str(tmp_path))
    assert known.resolve("gowalla") == tmp_path / "gowalla"


@pytest.mark.parametrize("entry", known.PUBLIC_DATASETS.values(), ids=lambda entry: entry.name)
def test_every_known_set_says_where_it_comes_from(entry: known.PublicDataset) -> None:
    assert entry.page.startswith("http")
    assert entry.terms
    assert entry.files
    assert bool(entry.downloads) != bool(entry.how)
