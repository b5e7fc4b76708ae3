"""Why a compilation is not kept on disk, or a file is not used."""

from __future__ import annotations


class NotKept(Exception):
    """A compilation cannot be kept on disk; the message says why."""


class Unusable(Exception):
    """A file of the cache cannot be used; the message says why."""


class CacheWarning(UserWarning):
    """Warns that the cache on disk does not serve a compilation, which is then made anew."""
