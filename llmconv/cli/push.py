"""`llmconv push`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option
from llmconv.errors import printable

if TYPE_CHECKING:
    from llmconv.push import Push


@click.command(name="push", cls=Command)
@click.argument("folder")
@click.argument("repository")
@option("--private", "Make the repository private; one that exists must be private.")
@option("--revision BRANCH", "Branch, made if it does not exist.  [default: main]")
@option("--pr", "Open a pull request instead, which needs no write access.")
@option("--message TEXT", "Message of the commit.")
@option("--verify-upload", "Compare the hashes on the Hub with the folder after the commit.")
@option("--dry-run", "Check the folder, compare it with the Hub, and stop.")
@options.as_json
@options.talk
def command(folder: str, repository: str, as_json: bool, dry_run: bool, **choices: Any) -> None:
    """Upload FOLDER to REPOSITORY on the Hugging Face Hub.

    All files of FOLDER, which llmconv made, are compared with llmconv.json first; then they become one commit, or
    none if the Hub has them. An interrupted upload is continued by the same command. Files of an earlier model of
    llmconv that FOLDER does not have are deleted in the same commit; a repository with weights of others is refused.
    If there is no README.md, a model card is written, and replaced by later ones until you edit it. The token is that
    of HF_TOKEN or `hf auth login`.

    Exit code 1: --verify-upload found a difference.
    """
    from llmconv.push import push

    done = push(folder, repository, dry_run=dry_run, **choices)
    if as_json:
        options.print_json(_as_result(done, dry_run))
    else:
        # prints a line about the commit, in a dry run also each file, and what differs
        same = len(done.files) - len(done.changed)
        if not done.is_needed:
            click.echo(f"{done.address} has all {same} files of {folder}: nothing to do")
        else:
            verb = "would push" if dry_run else "pushed"
            counts = f"{len(done.changed)} files, {done.nbytes:,} bytes; {same} unchanged, {len(done.deleted)} deleted"
            click.echo(f"{verb} {folder} to {done.address}: {counts}{', with a model card' if done.card else ''}")
        if done.commit:
            click.echo(printable(done.commit.pull_request or done.commit.url))
        for name in done.changed if dry_run else ():
            click.echo(f"  {name}  {done.files[name].size:,} bytes")
        for name in done.deleted if dry_run else ():
            click.echo(f"  {name}  deleted")
        for name in done.differing or ():
            click.echo(f"FAILED | {name} | the Hub has other bytes")
        if done.differing == ():
            click.echo(f"verified: the Hub has the sha256 of all {len(done.files)} files")
    if done.differing:
        click.get_current_context().exit(1)


def _as_result(done: Push, dry_run: bool) -> dict[str, Any]:
    commit = done.commit
    return {
        "repository": done.address.repository,
        "revision": done.address.revision or "main",
        "commit": commit.commit if commit else None,
        "url": commit.url if commit else None,
        "pull_request": (commit.pull_request or None) if commit else None,
        "files": list(done.files),
        "changed": list(done.changed),
        "deleted": list(done.deleted),
        "left_out": list(done.left_out),
        "bytes": done.nbytes,
        "model_card": done.card,
        "differing": None if done.differing is None else list(done.differing),
        "written": commit is not None and not dry_run,
    }
