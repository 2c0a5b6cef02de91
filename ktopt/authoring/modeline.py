"""The line that makes a YAML editor complete and check a rule file: a comment that names the schema."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path


def modeline(rules: str = "", schema: str = "") -> str:
    """The modeline of a rule file.

    rules    the file that it will stand in, "" or "-" where there is none yet: the schema's path is then absolute
    schema   a URL or path of the schema; by default the one that ships with ktopt
    """
    if not schema:
        path = Path(str(files("ktopt.schemas") / "ruleset.schema.json")).resolve()
        schema = str(path)
        if rules not in ("", "-"):
            try:
                schema = os.path.relpath(path, Path(rules).resolve().parent)
            except ValueError:  # another drive
                schema = str(path)
        schema = schema.replace(os.sep, "/")
    return f"# yaml-language-server: $schema={schema}"
