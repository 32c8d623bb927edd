"""The `replayssm` command: one file per command, each adding itself to `app`."""

from replayssm.cli.app import main

__all__ = ["main"]
