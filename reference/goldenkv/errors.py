"""Errors that several parts of the project share."""

from __future__ import annotations


class MissingExtra(ImportError):
    """A package that only an optional part of the project needs is not installed."""

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs the extra {extra!r}: pip install 'goldenkv[{extra}]'")
        self.extra = extra
        self.needed_for = needed_for
