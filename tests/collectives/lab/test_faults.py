"""The schedule of faults: it follows from the seed, hurts everybody in every way, and leaves two ranks."""

from __future__ import annotations

from collections import Counter

from collectives.lab.chaos_draws import FAULT_WEIGHTS, MIN_SURVIVORS, ChaosFault, draw_fault


def schedule(seed: int, faults: int, *, revives: bool) -> list[ChaosFault]:
    """Faults of five ranks, where all goes well; a new job whenever too few are left."""
    listed, there = [], set(range(5))
    for number in range(faults):
        gone = set(range(5)) - there if revives else set()
        if len(there) <= MIN_SURVIVORS and not gone:
            there = set(range(5))
        listed.append(draw_fault(seed, number, there, timeout=1.0, gone=gone))
        there -= {*listed[-1].lost}
        if listed[-1].revived is not None:
            assert listed[-1].revived in gone
            there.add(listed[-1].revived)
        assert len(there) >= MIN_SURVIVORS
    return listed


def test_the_same_seed_has_the_same_faults_and_another_has_others() -> None:
    for revives in (False, True):
        assert schedule(3, 100, revives=revives) == schedule(3, 100, revives=revives)
        assert schedule(3, 100, revives=revives) != schedule(4, 100, revives=revives)


def test_every_kind_happens_and_every_rank_is_hurt() -> None:
    listed = schedule(1, 500, revives=True)
    kinds = Counter(one.kind for one in listed)
    assert set(kinds) == {*FAULT_WEIGHTS, "revive", "revive and kill"}
    assert min(kinds.values()) >= 10, kinds
    assert {rank for one in listed for rank in one.lost} == set(range(5))
    assert "revive" not in {one.kind for one in schedule(1, 200, revives=False)}


def test_a_pause_is_shorter_than_the_timeout() -> None:
    """Else it would be a stop, after which the others go on without the rank."""
    pauses = [one for one in schedule(2, 500, revives=False) if one.kind == "pause"]
    assert pauses
    assert all(0 < gap <= 0.5 for one in pauses for gap in one.gaps)
