"""Sums under masks are the plain sums, whichever devices leave; and nothing else can be read from what is sent."""

import random
import sys
from array import array
from pathlib import Path
from unittest import mock

import numpy
import pytest

from fairfold.errors import AggregationFailed, InvalidState, RequestRefused
from fairfold.privacy.secure import keys, shamir
from fairfold.privacy.secure.client import Memory
from fairfold.privacy.secure.folder import MEMORY, ROUND, SIGNER, SecureFolder
from fairfold.privacy.secure.masking import BLOCK, FixedPointVector, Ring, add_masks, degrees, quorum
from fairfold.privacy.secure.messages import Masked, Session, parse_message
from fairfold.privacy.secure.segments import SegmentLayout
from fairfold.privacy.secure.server import Phase, SecureServer
from tests.support.secure import Play, a_session, vectors


def schedule(seed: int) -> Play:
    """A cohort in which 30 % leave, each in some phase; once in a while one that is larger than a complete graph."""
    draw = random.Random(seed)
    many = draw.randint(44, 60) if seed % 500 == 499 else draw.randint(4, 10)
    lengths = sorted(draw.sample(range(1, 40), draw.randint(1, 3)))
    leaving = draw.sample(range(many), int(0.3 * many))
    phases = [phase for phase in Phase if phase != Phase.DONE]
    return Play(a_session(*lengths), many, {one: draw.choice(phases) for one in leaving}, seed=seed)


def all_exact(seeds: range) -> None:
    unfinished = 0
    for seed in seeds:
        play = schedule(seed)
        try:
            assert play.exact(), seed
        except (RequestRefused, AggregationFailed):  # one in a thousand of large cohorts, since neighbors are drawn
            assert len(play.clients) > 41, seed
            unfinished += 1
    assert unfinished <= 1


@pytest.mark.usefixtures("quick_signatures")
def test_sums_are_exact_when_three_in_ten_leave_in_all_phases() -> None:
    all_exact(range(400, 600))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_signatures")
def test_ten_thousand_schedules() -> None:
    all_exact(range(10_000))


def test_everybody_in_every_phase() -> None:
    play = Play(a_session(5, 9, 20), 12)
    assert play.exact()
    assert play.server.survivors == sorted(play.devices)
    assert [len(total) for total in play.server.sums] == [5, 4, 11]


def test_a_vector_of_several_blocks_and_a_word_beyond() -> None:
    words, before = numpy.arange(2 * BLOCK + 1, dtype=numpy.uint32), numpy.arange(2 * BLOCK + 1, dtype=numpy.uint32)
    add_masks(words, [bytes(32)], [b"\x01" * 32])
    assert (words != before).mean() > 0.999
    add_masks(words, [b"\x01" * 32], [bytes(32)])
    assert numpy.array_equal(words, before)
    short = before[:3].copy()
    add_masks(short, [bytes(32)], [])
    long = before.copy()
    add_masks(long, [bytes(32)], [])
    plain = memoryview(array("I", before.tolist()))
    for start in (0, 1, BLOCK):  # as a device without numpy adds them
        expected = before[start:].copy()
        add_masks(expected, [bytes(32)], [b"\x01" * 32, b"\x02" * 32])
        mine = array("I", plain[start:])
        with mock.patch.dict("sys.modules"):
            del sys.modules["numpy"]
            add_masks(mine, [bytes(32)], [b"\x01" * 32, b"\x02" * 32])
        assert mine.tobytes() == expected.tobytes()
    assert numpy.array_equal(short, long[:3])  # a stream begins in the same way, however long it is


# -- what others see ---------------------------------------------------------------------------------------------------


def looks_uniform(words: FixedPointVector) -> bool:
    """Chi-square of all bytes: 255 degrees of freedom, refused beyond six standard deviations."""
    counts = numpy.bincount(words.view(numpy.uint8), minlength=256)
    expected = counts.sum() / 256
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return bool(abs(statistic - 255) < 6 * (2 * 255) ** 0.5)


def test_what_is_sent_is_uniform_even_to_all_but_one_of_the_neighbors() -> None:
    length = 50_000
    play = Play(a_session(length), 6).until(Phase.VECTORS)
    target = play[2]
    target.receive(play.messages[1002])
    masked = target.mask(numpy.zeros(length, dtype=numpy.uint32))
    sent = numpy.array(parse_message(Masked, masked, target.session_digest).vector)
    assert looks_uniform(sent)
    assert not looks_uniform(numpy.arange(length, dtype=numpy.uint32))  # the test can fail
    masks = {
        other: keys.pair_mask(
            keys.Agreement(play[other].mask_secret)(target.advert.mask_key), target.digest, 0, (target.place, other)
        )
        for other in range(6)
        if other != target.place
    }
    own = keys.own_mask(target.seed, target.digest, 0)
    for honest in masks:  # all others collude, and even its own mask is known, as it is of every survivor
        known = {other: mask for other, mask in masks.items() if other != honest}
        left = sent.copy()
        remove(left, target.place, known, own)
        assert looks_uniform(left)
    left = sent.copy()
    remove(left, target.place, masks, b"")  # of one that left all pairs are known, and not its own mask
    assert looks_uniform(left)
    remove(sent, target.place, masks, own)
    assert not sent.any()  # nothing else hides it: with all masks removed the vector is there


def remove(words: FixedPointVector, place: int, masks: dict[int, bytes], own: bytes) -> None:
    """Take known masks away, as the specification says: a pair's lower member adds it, the other takes it away."""
    added = [mask for other, mask in masks.items() if place < other] + ([own] if own else [])
    add_masks(words, [mask for other, mask in masks.items() if other < place], added)


def test_a_coalition_below_the_threshold_does_not_know_a_devices_secrets() -> None:
    play = Play(a_session(4), 12).until(Phase.SIGNATURES)
    target, threshold, half = play[3], play[3].ring.degrees.threshold, shamir.SHARE_BYTES
    others = [device for device in play.devices.values() if device is not target]
    kept = {device.place + 1: device.received[target.place] for device in others}
    for secret, part in ((target.seed, slice(half)), (target.mask_secret, slice(half, None))):
        shares = {place: both[part] for place, both in kept.items()}
        for first in range(len(shares) - threshold):
            some = dict(list(shares.items())[first : first + threshold])
            assert shamir.combine(some) == secret
            del some[next(iter(some))]
            assert shamir.combine(some) != secret


def test_no_two_rounds_segments_or_pairs_share_a_mask() -> None:
    found = {
        keys.pair_mask(b"c" * 32, cohort, segment, pair)
        for cohort in (b"a" * 32, b"b" * 32)
        for segment in (0, 1)
        for pair in ((0, 1), (0, 2))
    } | {keys.own_mask(b"c" * 32, b"a" * 32, segment) for segment in (0, 1)}
    assert len(found) == 10
    assert keys.pair_mask(b"c" * 32, b"a" * 32, 0, (1, 0)) in found  # both of a pair come to the same


# -- who is masked with whom -------------------------------------------------------------------------------------------


def test_degrees_are_those_that_were_computed() -> None:
    found = degrees(200), degrees(1_000), degrees(100)
    assert [(one.degree, one.threshold) for one in found[:2]] == [(40, 16), (56, 23)]
    assert found[2].degree == 40
    assert degrees(12).threshold == 6  # more than half of eleven


@pytest.mark.parametrize("many", [2, 3, 12, 41, 42, 100, 333])
def test_neighbors_are_mutual(many: int) -> None:
    ring = Ring(b"digest", range(many))
    for member in range(many):
        neighbors = ring.neighbors(member)
        assert len(neighbors) == ring.degrees.degree == len(set(neighbors))
        assert member not in neighbors
        assert all(member in ring.neighbors(other) for other in neighbors)
    assert ring.degrees.threshold <= ring.degrees.degree or many == 2
    assert Ring(b"another", range(many)).order != ring.order or many < 12


def test_two_sets_cannot_both_be_signed() -> None:
    for many in range(2, 300):
        assert 2 * quorum(many) > many + int(0.1 * many)
        assert quorum(many) <= max(0.7 * many, 2) or many < 10


def test_survivors_that_are_cut_off_are_seen() -> None:
    ring = Ring(b"digest", range(100))
    assert ring.isolated(set(range(100))) is None
    order, half = ring.order, ring.degrees.degree // 2
    kept = {*order[:5], *order[5 + half : 100 - half]}  # five between two stretches that are sent to be dead
    assert ring.isolated(kept) is not None
    assert Ring(b"digest", range(12)).isolated({1, 2}) is None  # all know all


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_a_size_that_is_too_thin_steps_down() -> None:
    layout = SegmentLayout.nested((10, 20, 40))
    assert layout.step_down({1: 2, 2: 1, 3: 0, 4: 0}, 2) == {1: 1, 2: 1, 3: 0, 4: 0}
    assert layout.step_down({1: 2, 2: 0, 3: 0, 4: 0}, 2) == {1: 0, 2: 0, 3: 0, 4: 0}
    assert layout.thin_segment({1: 2, 2: 2, 3: 0}, 2) is None
    assert layout.thin_segment({1: 2, 2: 0, 3: 0}, 2) == (1, 1)
    apart = SegmentLayout((10, 20), ((0,), (1,)))  # sizes that share no segment hide nobody of another size
    assert apart.step_down({1: 1, 2: 0, 3: 0}, 2) == {1: 0, 2: 0, 3: 0}


def test_a_thin_class_that_keeps_its_size_is_left_out() -> None:
    apart = SegmentLayout((10, 20), ((0,), (1,)))
    assert apart.without_thin_sizes({1: 1, 2: 0, 3: 0}, 2) == {2: 0, 3: 0}
    assert apart.without_thin_sizes({1: 1, 2: 0}, 2) == {}
    session = Session(7, 0, "train", 3, apart)
    server = SecureServer(session, {1000: 1, 1001: 0, 1002: 0, 1003: 0}, room=None)
    play = Play(session, 4)
    play.server, play.wanted = server, server.wanted
    assert play.exact()
    assert server.survivors == [1001, 1002, 1003]


def test_a_thin_class_is_summed_in_a_smaller_size() -> None:
    play = Play(a_session(5, 9, min_cohort=8), 12)
    assert play.exact()
    assert {device.size for device in play.devices.values()} == {0}


# -- between two messages ----------------------------------------------------------------------------------------------


def test_devices_go_on_in_other_processes(tmp_path: Path) -> None:
    session = a_session(4, 9, min_cohort=3)
    folders = {name: SecureFolder(tmp_path / str(name), name, min_cohort=3) for name in range(1, 6)}
    server = SecureServer(session, dict.fromkeys(folders, 1))
    sent = {name: vectors(numpy.random.default_rng(name), 9) for name in folders}
    for name, folder in folders.items():
        server.receive(name, folder.begin(session.packed(session.digest)))
    for phase in (Phase.SHARES, Phase.VECTORS, Phase.SIGNATURES, Phase.REVEALED):
        for name, message in server.close().items():
            with folders[name].resume_round(message) as device:
                if phase == Phase.SHARES:
                    reply = device.share(message)
                elif phase == Phase.VECTORS:
                    device.receive(message)
                    reply = device.mask(sent[name].copy())
                else:
                    reply = device.sign(message) if phase == Phase.SIGNATURES else device.reveal(message)
            server.receive(name, reply)
    server.close()
    assert numpy.array_equal(numpy.concatenate(server.sums), sum(sent.values()))
    for folder in folders.values():
        assert not (folder.folder / ROUND).exists()
        assert all(path.stat().st_mode & 0o77 == 0 for path in folder.folder.iterdir())
        with pytest.raises(RequestRefused, match="again"):  # it remembers the round in another process
            folder.begin(session.packed(session.digest))
        later = Session(session.run, 1, session.purpose, 3, session.layout, turn=1)
        assert folder.begin(later.packed(later.digest))


def test_what_a_device_keeps_is_what_it_wrote_or_refused(tmp_path: Path) -> None:
    session = a_session(4, min_cohort=3)
    folder = SecureFolder(tmp_path, 5, min_cohort=3)
    invitation = session.packed(session.digest)
    folder.begin(invitation)
    first = folder.identity()
    assert folder.identity().certificate == first.certificate
    assert folder.identity().signer.private_bytes_raw() == first.signer.private_bytes_raw()
    folder._save_memory(Memory(last_turns={(7, "train"): 3}))
    for name in (SIGNER, MEMORY, ROUND):
        path = tmp_path / name
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b"a", b"b", 1))
        with pytest.raises(InvalidState, match="damaged"), folder.resume_round(invitation):
            pass
        path.write_bytes(whole)
    with folder.resume_round(invitation) as device:
        assert device.memory.last_turns == {(7, "train"): 3}
    with pytest.raises(RequestRefused, match="another round than is open"), folder.resume_round(bytes(100)):
        pass
    assert (tmp_path / ROUND).exists()  # a stray message does not end it
