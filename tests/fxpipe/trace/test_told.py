"""Texts that are only logged, printed or kept for an error are told apart from those that are
used."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable

import pytest
import torch

from fxpipe.trace.told import is_only_told

logger = logging.getLogger(__name__)


class Size:
    """Notes whether the text that is made of it is only told."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def __format__(self, specification: str) -> str:
        self.told.append(is_only_told(sys._getframe(1)))
        return "3"

    def __str__(self) -> str:
        self.told.append(is_only_told(sys._getframe(1)))
        return "3"

    __repr__ = __str__


def log_it(n: Size) -> None:
    logger.debug(f"size {n}")


def log_it_on_several_lines(n: Size) -> None:
    logger.warning(
        f"sizes {n:>5} and {n}",
        extra={"size": str(n)},
    )


def log_it_by_percent(n: Size) -> None:
    logger.debug("size %s" % n)  # noqa: UP031


def log_it_by_a_method(n: Size) -> None:
    logging.getLogger(__name__).debug("size {}".format(n))  # noqa: UP032


def log_a_sum(n: Size) -> None:
    logger.debug("size " + str(n) + " and " + repr(n))


def let_the_logger_write_it(n: Size) -> None:
    logger.warning("size %s", n)


def print_a_list(n: Size) -> None:
    print(f"{[n]}")


def give_a_warning(n: Size) -> None:
    warnings.warn(f"size {n}", stacklevel=2)


def assert_it(n: Size) -> None:
    torch._assert(True, f"size {n}")


TOLD = (
    log_it,
    log_it_on_several_lines,
    log_it_by_percent,
    log_it_by_a_method,
    log_a_sum,
    let_the_logger_write_it,
    print_a_list,
    give_a_warning,
    assert_it,
)

names: dict[str, int] = {"3": 1}


class Log:
    """Has a method that gives something, with a name as if it told something."""

    def log(self, text: str) -> str:
        return text


def return_it(n: Size) -> object:
    return f"{n}"


def keep_it(n: Size) -> object:
    text = f"{n}"
    logger.debug(text)
    return text


def log_what_is_found(n: Size) -> None:
    logger.debug(names[f"{n}"])


def log_what_is_kept(n: Size) -> None:
    logger.debug(names.setdefault(f"{n}", 2))


def log_with_a_condition(n: Size) -> None:
    logger.debug("three" if f"{n}" == "3" else "other")


def log_what_a_name_is_given_to(n: Size) -> None:
    logger.debug(text := f"{n}")
    names[text] = 1


def use_what_a_call_gives(n: Size) -> object:
    return names.get(Log().log(f"{n}"))


def keep_it_by_a_statement(n: Size) -> None:
    names.setdefault(f"{n}", 2)


USED = (
    return_it,
    keep_it,
    log_what_is_found,
    log_what_is_kept,
    log_with_a_condition,
    log_what_a_name_is_given_to,
    use_what_a_call_gives,
    keep_it_by_a_statement,
)


@pytest.mark.parametrize("function", TOLD)
@pytest.mark.filterwarnings("ignore:size")
def test_text_that_nothing_is_computed_by_is_only_told(function):
    function(size := Size())
    assert size.told
    assert all(size.told)


@pytest.mark.parametrize("function", USED)
def test_text_that_may_be_a_key_is_used(function):
    function(size := Size())
    assert size.told
    assert not any(size.told)


def test_text_of_which_the_source_is_not_known_is_used():
    namespace: dict[str, Callable[[Size], None]] = {}
    exec("def function(n): print(f'{n}')", namespace)
    namespace["function"](size := Size())
    assert size.told == [False]
