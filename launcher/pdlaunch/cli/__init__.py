"""The command line: the only package that knows Click. One module a group of commands."""

from __future__ import annotations

import sys

import click

from pdlaunch import __version__
from pdlaunch.cli import (
    ask,
    bench,
    build,
    deployment,
    doctor,
    engine,
    new,
    parameters,
    patch,
    recipe,
    render,
    up,
)
from pdlaunch.console import Terminal
from pdlaunch.errors import Interrupted, PdError


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=parameters.examples(
        "pdlaunch up smollm2-135m-cpu --detach",
        'pdlaunch ask smollm2-135m-cpu "What is the capital of France?"',
        "pdlaunch status",
        "pdlaunch down",
    ),
)
@click.version_option(__version__, prog_name="pdlaunch")
def cli() -> None:
    """Prefill/decode disaggregated vLLM with push-mode KV transfer, from one recipe."""


cli.add_command(up.up)
cli.add_command(deployment.down)
cli.add_command(deployment.status)
cli.add_command(deployment.logs)
cli.add_command(deployment.restart)
cli.add_command(ask.ask)
cli.add_command(bench.bench)
cli.add_command(doctor.doctor)
cli.add_command(new.new)
cli.add_command(recipe.recipe)
cli.add_command(render.render)
cli.add_command(build.build)
cli.add_command(engine.engine)
cli.add_command(patch.patch)


def main() -> None:
    """Console entry point: the one boundary where errors become messages and exit codes."""
    try:
        cli.main(standalone_mode=False)
    except Interrupted as stopped:
        Terminal().status(str(stopped))
        sys.exit(stopped.exit_code)
    except PdError as error:
        Terminal().error(error)
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
