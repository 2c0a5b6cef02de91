"""The line that makes a YAML editor complete and check a rule file: a comment that names the schema.

Where ktopt is installed is nobody else's business: a path into it would be wrong in every other checkout. So the line names a
schema that lies in the project (`ktopt schema ruleset > ktopt.schema.json`), or the one that the user gives.
"""

from __future__ import annotations

import os
from pathlib import Path

SCHEMA_FILE = "ktopt.schema.json"
"""The file's name, in the rule file's folder or one above."""


def modeline(rules: str = "", schema: str = "") -> str:
    """The modeline of a rule file, or "" where there is no schema to name.

    rules    the file that it will stand in, "" or "-" where there is none yet
    schema   a URL or path of the schema; by default the nearest SCHEMA_FILE, relative to the rule file
    """
    if not schema:
        if rules in ("", "-"):
            return ""
        folder = Path(rules).resolve().parent
        found = next((f / SCHEMA_FILE for f in (folder, *folder.parents) if (f / SCHEMA_FILE).is_file()), None)
        if found is None:
            return ""
        path = os.path.relpath(found, folder).replace(os.sep, "/")
        schema = path if path.startswith("../") else f"./{path}"
    return f"# yaml-language-server: $schema={schema}"
