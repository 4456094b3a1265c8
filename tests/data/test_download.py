import fcntl
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fastfedul.data import download as downloading
from fastfedul.data.download import Download, FetchError, download, matches

CONTENT = np.random.default_rng(0).bytes(300_000)
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()


@dataclass
class Behaviour:
    """How the server answers, and what it was asked."""

    content: bytes = CONTENT
    breaks_after: list[int] = field(default_factory=list)
    resumes: bool = True
    says_length: bool = True
    shift: int = 0
    status: int = 200
    ranges: list[str | None] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def do_GET(self) -> None:
        how = self.behaviour
        wanted = self.headers.get("Range")
        how.ranges.append(wanted)
        start = int(wanted[6:-1]) if wanted and how.resumes else 0
        if how.status != 200:
            return self.send_error(how.status)
        if start and start >= len(how.content):
            return self.send_error(416)
        body = how.content[start:]
        self.send_response(206 if start else 200)
        if start:
            place = f"bytes {start + how.shift}-{len(how.content) - 1}/*"
            self.send_header("Content-Range", place)
        if how.says_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if how.breaks_after:
            body = body[: how.breaks_after.pop(0)]
        self.wfile.write(body)
        self.close_connection = True
        return None

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, Behaviour]]:
    behaviour = Behaviour()
    handler = type("Bound", (Handler,), {"behaviour": behaviour})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/file", behaviour
        running.shutdown()
        thread.join()


Server = tuple[str, Behaviour]


@pytest.mark.parametrize("checksum", [SHA256, MD5, None])
def test_a_file_arrives_whole(
    server: Server, tmp_path: Path, checksum: str | None
) -> None:
    part = tmp_path / "x.part"
    download(Download(server[0], checksum), part)
    assert part.read_bytes() == CONTENT


def test_a_download_that_broke_off_goes_on_where_it_was(
    server: Server, tmp_path: Path
) -> None:
    part = tmp_path / "x.part"
    part.write_bytes(CONTENT[:120_000])
    download(Download(server[0], SHA256), part)
    assert part.read_bytes() == CONTENT
    assert server[1].ranges == ["bytes=120000-"]


def test_a_breaking_connection_is_taken_up_again(
    server: Server, tmp_path: Path
) -> None:
    server[1].breaks_after = [100_000, 50_000, 1]
    part = tmp_path / "x.part"
    download(Download(server[0], SHA256), part)
    assert part.read_bytes() == CONTENT
    assert server[1].ranges == [
        None,
        "bytes=100000-",
        "bytes=150000-",
        "bytes=150001-",
    ]


def test_a_connection_that_keeps_breaking_leaves_what_came(
    server: Server, tmp_path: Path
) -> None:
    server[1].breaks_after = [10_000] * 4
    part = tmp_path / "x.part"
    with pytest.raises(FetchError, match="run it again to resume"):
        download(Download(server[0], SHA256), part)
    assert part.read_bytes() == CONTENT[:40_000]
    download(Download(server[0], SHA256), part)
    assert part.read_bytes() == CONTENT


def test_a_server_that_cannot_resume_sends_everything_again(
    server: Server, tmp_path: Path
) -> None:
    server[1].resumes = False
    part = tmp_path / "x.part"
    part.write_bytes(b"old" * 1000)
    download(Download(server[0], SHA256), part)
    assert part.read_bytes() == CONTENT


def test_a_server_that_resumes_elsewhere_is_not_believed(
    server: Server, tmp_path: Path
) -> None:
    server[1].shift = 1
    part = tmp_path / "x.part"
    part.write_bytes(CONTENT[:1000])
    with pytest.raises(FetchError, match="wrong place"):
        download(Download(server[0]), part)


def test_too_long_a_beginning_is_thrown_away(server: Server, tmp_path: Path) -> None:
    part = tmp_path / "x.part"
    part.write_bytes(bytes(400_000))
    download(Download(server[0], SHA256), part)
    assert part.read_bytes() == CONTENT
    assert server[1].ranges == ["bytes=400000-", None]


def test_a_complete_beginning_is_not_downloaded_again(
    server: Server, tmp_path: Path
) -> None:
    part = tmp_path / "x.part"
    part.write_bytes(CONTENT)
    download(Download(server[0], SHA256), part)
    assert server[1].ranges == []


def test_a_wrong_checksum_removes_the_file(server: Server, tmp_path: Path) -> None:
    server[1].content = CONTENT[:-1] + b"?"
    part = tmp_path / "x.part"
    with pytest.raises(FetchError, match="does not have the checksum"):
        download(Download(server[0], SHA256), part)
    assert not list(tmp_path.iterdir())


def test_a_wrong_beginning_is_found_by_the_checksum(
    server: Server, tmp_path: Path
) -> None:
    part = tmp_path / "x.part"
    part.write_bytes(b"wrong")
    with pytest.raises(FetchError, match="checksum"):
        download(Download(server[0], SHA256), part)
    download(Download(server[0], SHA256), part)
    assert part.read_bytes() == CONTENT


@pytest.mark.parametrize("status", [403, 404, 500])
def test_an_answer_that_is_no_file_is_named(
    server: Server, tmp_path: Path, status: int
) -> None:
    server[1].status = status
    with pytest.raises(FetchError, match=f"answered {status}"):
        download(Download(server[0], SHA256), tmp_path / "x.part")
    assert not list(tmp_path.iterdir())


def test_nobody_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="cannot reach http://127"):
        download(Download("http://127.0.0.1:9/file", SHA256), tmp_path / "x.part")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("says_length", [True, False])
def test_progress_counts_up_to_the_whole(
    server: Server, tmp_path: Path, says_length: bool
) -> None:
    server[1].says_length = says_length
    seen: list[tuple[int, int | None]] = []
    part = tmp_path / "x.part"
    part.write_bytes(CONTENT[:50_000])
    download(Download(server[0]), part, lambda *progress: seen.append(progress))
    counts = [done for done, _ in seen]
    assert counts == sorted(counts)
    assert counts[0] > 50_000
    assert seen[-1] == (300_000, 300_000 if says_length else None)


@pytest.mark.parametrize("says_length", [True, False])
def test_a_server_that_never_stops_sending_is_stopped(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says_length: bool
) -> None:
    monkeypatch.setattr(downloading, "_LARGEST_FILE", 200_000)
    server[1].says_length = says_length
    with pytest.raises(FetchError, match="more than 200,000 bytes"):
        download(Download(server[0]), tmp_path / "x.part")
    assert not list(tmp_path.iterdir())


def test_two_downloads_of_one_file_do_not_mix(server: Server, tmp_path: Path) -> None:
    part = tmp_path / "x.part"
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FetchError, match="another process is downloading"):
            download(Download(server[0], SHA256), part)


def test_a_folder_that_is_not_there_is_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="cannot write"):
        download(Download(server[0], SHA256), tmp_path / "nowhere" / "x.part")


def test_checksums_tell_files_apart(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(CONTENT)
    assert matches(path, SHA256)
    assert matches(path, MD5)
    assert not matches(path, "md5:" + "0" * 32)
