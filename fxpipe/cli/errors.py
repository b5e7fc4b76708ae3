"""What a user can mend is said in one message, with exit code 2, and without a traceback."""

from __future__ import annotations

import click

USERS = (ValueError, TypeError, RuntimeError, OSError, ImportError)
"""What fxpipe, and models, raise where arguments do not fit. Others are defects: with traceback."""


class UserError(click.ClickException):
    """An error of the user's."""

    exit_code = 2


def is_users(error: Exception) -> bool:
    """Whether there is something that the user can mend."""
    is_clicks = isinstance(error, click.exceptions.Exit | click.Abort)  # which are RuntimeErrors
    return isinstance(error, USERS) and not is_clicks


def said(error: Exception) -> str:
    """The message of an error, and what has been noted at it."""
    notes = getattr(error, "__notes__", [])
    return "\n".join([str(error) or type(error).__name__, *notes])
