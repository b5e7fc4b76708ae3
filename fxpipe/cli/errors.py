"""Errors that the user can fix: one message, exit code 2, no traceback."""

from __future__ import annotations

import click

USERS = (ValueError, TypeError, RuntimeError, OSError, ImportError)
"""The classes of errors that fxpipe and models raise for wrong arguments. Any other error is taken
for a bug, and shown with its traceback."""


class UserError(click.ClickException):
    """An error that the user can fix; the message says how."""

    exit_code = 2


def is_users(error: Exception) -> bool:
    """Whether the user can fix the cause of an error; it is then shown without a traceback."""
    # click ends commands by these two exceptions, which are RuntimeErrors but no errors.
    is_clicks = isinstance(error, click.exceptions.Exit | click.Abort)
    return isinstance(error, USERS) and not is_clicks


def said(error: Exception) -> str:
    """The text to print for an error: its message and its notes."""
    notes = getattr(error, "__notes__", [])
    return "\n".join([str(error) or type(error).__name__, *notes])
