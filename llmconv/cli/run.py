"""`llmconv run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option
from llmconv.progress import is_quiet, say, set_quiet

if TYPE_CHECKING:
    from llmconv.steps.execution import Outcome
    from llmconv.steps.run_file import RunFile
    from llmconv.steps.step import Step


STDERR = 2  # descriptor: with `--json` the lines of the steps go there


@click.command("run", cls=Command)
@click.argument("file", type=click.Path(path_type=Path), required=False)
@option(
    "--set sets NAME=VALUE",
    "Value of a variable, or of an option as STEP.OPTION=VALUE. May be repeated.",
    multiple=True,
)
@option("--force", "Do all steps, also those that are unchanged.")
@option("--report DIR", "Write run.json and run.md there.", options.Output())
@option("--github", "Print failures of verify as GitHub Actions annotations.")
@option("--schema", "Print the JSON schema of run files, for editors, and stop.")
@option("--dry-run", "Check the file, print what is to be done and why, and stop.")
@options.as_json
@options.talk
@click.pass_context
def command(
    ctx: click.Context, /, file: Path | None, sets: tuple[str, ...], report: Path | None, dry_run: bool, **flags: bool
) -> None:
    """Do the steps that FILE lists, but for those that are done.

    FILE is YAML: conversions, merges, exports, verifications, texts, uploads; docs/run.md describes it. Each step is
    one command of llmconv with its options, and runs as a process of its own in the folder of FILE. Names and values
    of options are checked first. A step whose command, inputs and outputs are as the last run left them is not done
    again: sizes and times of files are compared, ETags of objects, commits of the Hub. After an error the others are
    not run; the same command continues there.

    The exit code is that of the step that failed.
    """
    from llmconv.steps import execution
    from llmconv.steps.execution import Execution
    from llmconv.steps.run_file import read_run_file, run_file_schema

    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    if flags["schema"]:
        options.print_json(run_file_schema(group))
        return
    if file is None:
        raise click.UsageError("missing argument `FILE`", ctx)
    quiet = is_quiet()
    for text in sets:
        if "=" not in text:
            raise click.UsageError(f"`--set {text}` has no `=`", ctx)
    run_file = read_run_file(file, dict(text.split("=", 1) for text in sets), group, needs_inputs=True)
    set_quiet(quiet)  # the steps' own `-q` were parsed
    as_json, force = flags["as_json"], flags["force"]
    choices = {"force": force, "quiet": quiet, "github": flags["github"], "stdout": STDERR if as_json else None}
    outcomes = [*Execution(run_file, force=force).plan()] if dry_run else _run(run_file, report, **choices)
    if as_json:
        options.print_json(execution.summary_dict(file.name, outcomes))
    else:
        table, commands = execution.summary_table(outcomes), [outcome.step.line for outcome in outcomes]
        click.echo("\n".join([*table, "", *commands] if dry_run else ["", *table]))
    ctx.exit(execution.exit_code(outcomes))


def _run(file: RunFile, report: Path | None, **choices: Any) -> list[Outcome]:
    """Does the steps and writes the report, as the only run of the file."""
    from llmconv.files.safe_folder import require_writable
    from llmconv.steps import execution
    from llmconv.steps.execution import REPORT_FILES, Execution, run_lock

    with run_lock(file.path) as lock:
        if report:
            require_writable(report, REPORT_FILES)

        def announce(number: int, step: Step, reason: str) -> None:
            say(f"step {number} of {len(file.steps)}, {step.name} ({reason}): {step.line}")

        outcomes = [*Execution(file, lock, **choices).run(announce)]
        if report:
            execution.write_summary(report, file.path.name, outcomes)
    return outcomes
