"""Names as they may be shown: an id may hold any character, and a terminal or a log obeys some of them."""

from __future__ import annotations


def printable(text: str, *, lines: bool = False) -> str:
    r"""`text` with every character that is no plain sign written as its escape, such as `\x1b`.

    That are controls, line breaks (unless `lines`), and marks that are invisible or turn the direction of
    writing.
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or (lines and sign == "\n") else sign.encode("unicode_escape").decode()
        for sign in text
    )
