"""Errors that the user can fix: one message, exit code 2, no traceback."""

from __future__ import annotations

import click

USERS = (ValueError, TypeError, RuntimeError, OSError, ImportError)
"""What fxpipe and models raise where arguments do not fit. Others are bugs: with a traceback."""


class UserError(click.ClickException):
    """An error that the user can fix."""

    exit_code = 2


def is_users(error: Exception) -> bool:
    """Whether it is one that the user can fix."""
    is_clicks = isinstance(error, click.exceptions.Exit | click.Abort)  # which are RuntimeErrors
    return isinstance(error, USERS) and not is_clicks


def said(error: Exception) -> str:
    """The message of an error, and its notes."""
    notes = getattr(error, "__notes__", [])
    return "\n".join([str(error) or type(error).__name__, *notes])
