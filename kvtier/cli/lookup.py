"""`kvtier lookup`: the stored part of a prompt, and its location."""

import typer

from kvtier.admin.answers import LookupAnswer
from kvtier.admin.lookup import look_up
from kvtier.cli import prompts
from kvtier.cli.app import NotDone, app
from kvtier.cli.place import ConfigOption, JsonOption, PathArgument, deployment
from kvtier.cli.tables import print_table, show
from kvtier.runtime.exit_status import FOUND_BAD, MEANINGS, OK
from kvtier.runtime.units import counted


@app.command("lookup", epilog=MEANINGS)
def lookup(
    ctx: typer.Context,
    path: PathArgument = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    namespace: prompts.NamespaceOption = None,
    tokens: prompts.TokensOption = None,
    prompt: prompts.PromptOption = None,
    prompt_file: prompts.PromptFileOption = None,
    salt: prompts.SaltOption = "",
) -> int:
    """Show how much of a prompt is stored, and where."""
    given = prompts.PromptOptions(tokens, prompt, prompt_file, salt)
    if not given.is_given(ctx):
        raise NotDone("which prompt? name one with --tokens, --prompt or --prompt-file")
    with deployment(path, config, needs_settings=False, reads=True) as opened:
        namespace_id = None if namespace is None else prompts.namespace_of(namespace, opened)
        answer = look_up(opened, prompts.tokens_of(given, opened, namespace_id), salt, namespace_id)
    show(answer, as_json, _print)
    return OK if any(hit.hit_tokens for hit in answer.hits) else FOUND_BAD


def _print(answer: LookupAnswer) -> None:
    found = [hit for hit in answer.hits if hit.hit_tokens]
    if not found:
        what = "this token" if answer.tokens == 1 else f"these {answer.tokens:,} tokens"
        is_short = answer.hits and not any(hit.chunks for hit in answer.hits)
        where = counted(len(answer.hits), "namespace")
        print(f"nothing is stored of {what}{' (less than a chunk)' if is_short else ''}, in {where}")
    for hit in found:
        name = f"{hit.namespace[:12]}{f' ({hit.model})' if hit.model else ''}"
        print(
            f"{name}: {hit.hit_tokens:,} of {answer.tokens:,} tokens, {hit.hit_chunks:,} of "
            f"{counted(hit.chunks, 'chunk')}; the last one's key is {hit.last_key}"
        )
        rows = [("set", "from chunk", "chunks", "files", "written by")]
        rows += [
            (place.set_id, f"{place.first_chunk:,}", f"{place.chunks:,}", " ".join(place.files), place.owner or "-")
            for place in hit.sets
        ]
        print_table(rows, right=(1, 2))
