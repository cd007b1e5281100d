"""QR codes: what a reader sees, and the law of their correction."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from fairfold.cli.qr import BLOCKS, CORRECTION, _interleaved, _product, _raw_bits, encode, terminal_code

LINK = "http://localhost:8001/#" + "ff1-" + "Ab-_9" * 13


@pytest.mark.parametrize("version", [1, 5, 7, 10, 15])
def test_every_block_is_zero_at_the_roots_of_its_correction(version: int) -> None:
    """A block with its correction is a polynomial that is divisible by (x − 1)(x − 2)(x − 4)…"""
    blocks, correction, total = BLOCKS[version - 1], CORRECTION[version - 1], _raw_bits(version) // 8
    words = _interleaved(version, [(7 * place + 3) % 256 for place in range(total - correction * blocks)])
    assert len(words) == total
    long, (data, rest) = total % blocks, (words[: -correction * blocks], words[-correction * blocks :])
    short = total // blocks - correction
    for block in range(blocks):
        extra = [data[blocks * short + block - (blocks - long)]] if block >= blocks - long else []
        polynomial = [*data[: blocks * short][block::blocks], *extra, *rest[block::blocks]]
        root = 1
        for _ in range(correction):
            value = 0
            for word in polynomial:
                value = _product(value, root) ^ word
            assert value == 0
            root = _product(root, 2)


def test_a_code_is_what_a_reader_read() -> None:
    """zbarimg 0.23 read these modules as the link."""
    rows = "\n".join("".join("01"[dark] for dark in row) for row in encode(LINK.encode()))
    assert (
        hashlib.sha256(rows.encode()).hexdigest() == "4e34973ab6cf6ee4cc04b568d61b1209d869e4f01da4b047c877536677d3339c"
    )


def test_the_terminal_shows_two_rows_in_a_line_with_a_margin() -> None:
    lines = terminal_code(LINK).splitlines()
    side = len(encode(LINK.encode()))
    assert len(lines) == (side + 5) // 2
    assert {len(line) for line in lines} == {side + 4}
    assert set(lines[0]) == {"█"}


@pytest.mark.skipif(shutil.which("zbarimg") is None, reason="no reader of QR codes: apt-get install zbar-tools")
@pytest.mark.parametrize("length", [1, 40, 100, 250, 400])
def test_a_reader_reads_it(tmp_path: Path, length: int) -> None:
    content = ("ab:,Z-" * length)[:length]
    modules = encode(content.encode())
    side = len(modules) + 8
    rows = [b"\xff" * side] * 4
    rows += [b"\xff" * 4 + bytes(0 if dark else 255 for dark in row) + b"\xff" * 4 for row in modules]
    rows += [b"\xff" * side] * 4
    wide = [bytes(value for value in row for _ in range(6)) for row in rows for _ in range(6)]
    (tmp_path / "code.pgm").write_bytes(b"P5 %d %d 255\n" % (6 * side, 6 * side) + b"".join(wide))
    command = ["zbarimg", "-q", "--raw", str(tmp_path / "code.pgm")]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == content


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        encode(bytes(600))
