"""`python -m ktopt.server.main`: `ktopt serve` by KTransformers' name, with its flags. As there, requests may name any model."""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """Serve, and return the exit code."""
    from ktopt.cli import main

    return main(["serve", "--any_model", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
