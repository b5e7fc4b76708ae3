import pytest

from fxpipe.inspect.report import bubble
from fxpipe.inspect.text import human_bytes, human_time


@pytest.mark.parametrize(("stages", "chunks"), [(1, 4), (2, 8), (4, 1), (4, 32)])
def test_the_bubble_of_equal_stages_is_the_textbooks(stages, chunks):
    assert bubble([1.0] * stages, chunks) == pytest.approx((stages - 1) / (chunks + stages - 1))


def test_a_slow_stage_makes_the_others_wait():
    # One micro-batch takes 1 + 3 s; every further one comes 3 s later: 13 s in all for four,
    # in which two lanes could have worked 26 s and have worked 16.
    assert bubble([4.0, 12.0], 4) == pytest.approx(1 - 16 / 26)


def test_nothing_to_do_is_no_bubble():
    assert bubble([0.0, 0.0], 4) == 0


def test_sizes_and_times_are_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1536, 3 * 2**20, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 TiB",
    ]
    assert [human_time(s) for s in (2, 1.5e-3, 4e-6)] == ["2.00 s", "1.5 ms", "4 µs"]
