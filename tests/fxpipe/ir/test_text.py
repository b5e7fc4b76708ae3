"""Sizes for people."""

from __future__ import annotations

from fxpipe.ir.text import human_bytes, too_little


def test_sizes_have_the_unit_that_makes_them_short():
    assert [human_bytes(size) for size in (0, 1023, 1536, 62_929_308, 3 * 2**30)] == [
        *("0 B", "1023 B", "1.5 KiB", "60.0 MiB", "3.0 GiB")
    ]


def test_what_is_short_can_be_read_where_two_sizes_are_alike_in_words():
    said = too_little("device 0", 2**30 + 4096, 2**30)
    assert said == "device 0 needs 1.0 GiB and has 1.0 GiB, 4.0 KiB short"
