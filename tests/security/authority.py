"""A certificate authority of a test, and the files that it fills."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import trustme


class Authority:
    """Signs certificates and writes them, with their keys, into a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self.ca = trustme.CA()
        self.file = folder / f"{name}.pem"
        self.ca.cert_pem.write_to_path(str(self.file))

    def issue(
        self, name: str, identities: Sequence[str] = ("127.0.0.1", "localhost"), *, age_days: int = 0
    ) -> tuple[Path, Path]:
        """Certificate and key, replaced as a rotation does it: written aside, then renamed.

        With `age_days` it was valid for a day, that long ago.
        """
        begin = end = None
        if age_days:
            begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=age_days)
            end = begin + datetime.timedelta(days=1)
        made = self.ca.issue_cert(*identities, common_name=name, not_before=begin, not_after=end)
        cert, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        aside = self._folder / f"{name}.new"
        for index, blob in enumerate(made.cert_chain_pems):
            blob.write_to_path(str(aside), append=index > 0)
        os.replace(aside, cert)
        made.private_key_pem.write_to_path(str(aside))
        os.replace(aside, key)
        return cert, key
