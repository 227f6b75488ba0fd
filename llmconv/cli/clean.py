"""`llmconv clean`."""

from __future__ import annotations

import click

from llmconv.cli import options
from llmconv.cli.command_group import Command
from llmconv.cli.options import option

RULE = "let a lifecycle rule of the bucket abort incomplete multipart uploads after a day"
# what becomes of open uploads, by scheme, where they cannot be listed
UNLISTED = {
    "az": "Azure deletes the blocks of interrupted uploads after a week",
    "abfss": "Azure deletes the blocks of interrupted uploads after a week",
    "gs": f"open uploads, which the store bills, are not listed: {RULE}",
}
WITHOUT_BOTO3 = (
    f"open uploads, which the store bills, could not be listed: install boto3 (`pip install boto3`), or {RULE}"
)


@click.command(name="clean", cls=Command)
@click.argument("uri")
@option("--dry-run", "List what would be deleted, and stop.")
@options.as_json
@options.talk
def command(uri: str, dry_run: bool, as_json: bool) -> None:
    """Delete what an interrupted run left at URI in an object store.

    Deletes the journal, the shards that were not published, and open multipart uploads, which the store bills. A
    published output and files of others stay. Make sure that no run is writing there; to continue a run instead, give
    its command again with --resume.
    """
    from llmconv.addresses import parse_address
    from llmconv.output.store_folder import clean

    done = clean(uri, dry_run=dry_run)
    if as_json:
        found = {"objects": list(done.objects), "uploads": done.uploads}
        options.print_json({"output": uri, **found, "deleted": not dry_run})
        return
    verb = "would delete" if dry_run else "deleted"
    uploads = "" if done.uploads is None else f" and {done.uploads} open upload(s)"
    click.echo(f"{verb} {len(done.objects)} object(s){uploads} of {uri}")
    for key in done.objects if dry_run else ():
        click.echo(f"  {key}")
    if done.uploads is None:
        click.echo(UNLISTED.get(parse_address(uri).scheme, WITHOUT_BOTO3), err=True)
