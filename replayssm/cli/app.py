"""The command line application and its one way to report errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from replayssm.cli import bench, check, demo, drift, env, formats, plan
from replayssm.env import package_version

app = typer.Typer(name="replayssm", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("env")(env.command)
app.command("plan")(plan.command)
app.command("demo")(demo.command)
app.command("check")(check.command)
app.command("bench")(bench.command)
app.command("drift")(drift.command)
app.command("formats")(formats.command)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    """Decode hybrid language models from a checkpoint of the SSM state and a ring of the last inputs."""
    if version:
        typer.echo(f"replayssm {package_version('replayssm')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a wrong call is one line on stderr and exit code 2."""
    try:
        return app(args=arguments, prog_name="replayssm", standalone_mode=False) or 0
    except typer.Abort:
        return _error("interrupted", 130)
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        return _error(message, 2)


def _message(error: Exception) -> str | None:
    """What to tell the user about a wrong call, or None for a fault of ours."""
    # Typer's usage errors come from click or from its own copy of it, by version; both know this method.
    if hasattr(error, "format_message"):
        return str(error.format_message())
    from replayssm.checks import ReplayError

    return str(error) if isinstance(error, ReplayError) else None


def _error(message: str, code: int) -> int:
    print("replayssm: " + " ".join(message.split()), file=sys.stderr)
    return code
