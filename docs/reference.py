"""MkDocs hook: generates the reference pages, and copies pages that stand elsewhere in the repository.

A link from a page to a file of the repository that is no page of the site becomes the path of that file, so that the
same Markdown works on the site and in the repository. A link to a file that does not exist ends the build.
"""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvtier.cli import main
from kvtier.config.settings import Settings
from kvtier.server.app import make_routes

ROOT = Path(__file__).resolve().parents[1]
COPIES = {"security.md": "SECURITY.md", "benchmarks.md": "benchmarks/README.md"}  # page -> its file in the repository
PICTURES = ("benchmarks/results/**/*.svg", "server/screenshots/*.png")  # served under their path in the repository
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
KEY = re.compile(r"( *)(?:# )?(\w+):(?: +([^#\n]*))?")  # a setting of default.yaml; `# root:` has no default
# Commands of kvtier, by the words that name them.
COMMANDS = (
    "check", "doctor", "plan", "stats", "lookup", "verify", "evict", "pin", "unpin", "quota", "bench", "index rebuild",
    "index check", "serve", "calibrate", "weights plan", "weights shard", "weights verify", "weights bench",
)  # fmt: skip
METHODS = ("get", "put", "post", "delete")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the generated and the copied pages."""
    pages = {"settings.md": settings_page(), "rest.md": rest_page(), "cli.md": cli_page()}
    pages |= {page: (ROOT / source).read_text() for page, source in COPIES.items()}
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    for pattern in PICTURES:
        for picture in ROOT.glob(pattern):
            path = picture.relative_to(ROOT).as_posix()
            files.append(File.generated(config, path, abs_src_path=str(picture)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the repository."""
    here = page.file.src_uri
    source = COPIES.get(here, f"docs/{here}")
    served = {COPIES.get(file.src_uri, f"docs/{file.src_uri}"): file.src_uri for file in files}
    served |= {file.src_uri: file.src_uri for file in files if file.generated_by}  # pictures, by their own path
    served["configs/default.yaml"] = "settings.md"  # which is made of it

    def rewritten(match: re.Match[str]) -> str:
        mark, text, target, heading = match.groups()
        if "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in served:
            link = posixpath.relpath(served[path], posixpath.dirname(here) or ".")
            return f"{mark}[{text}]({link}{heading or ''})"
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: {target} leads nowhere")
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return LINK.sub(rewritten, markdown)


# --- settings ---


def settings_page() -> str:
    """Return the table of all settings: types and bounds by the pydantic models, meanings by configs/default.yaml."""
    meanings = dict(_meanings((ROOT / "configs/default.yaml").read_text()))
    schema = Settings.model_json_schema()
    lines = [
        "# Settings",
        "",
        "Generated from the settings' models and from the comments of `configs/default.yaml`. A key can be given, from",
        "the strongest source to the weakest,",
        "",
        '1. in the connector\'s extra configuration: `{"root": "/mnt/kv", "io": {"threads": 16}}`;',
        "2. in the environment: `KVTIER_ROOT=/mnt/kv`, `KVTIER_IO__THREADS=16`;",
        "3. in a YAML file, named by `config` in the extra configuration or by `KVTIER_CONFIG`.",
        "",
        "Byte sizes are numbers or texts: GiB and MiB count in 1024s, GB and MB in 1000s. Times are seconds or texts:",
        "90s, 15m, 12h, 7d, 2w. An unknown key, and a value that is wrong, stop start-up.",
    ]
    groups: dict[str, list[str]] = {}
    for key, definition in _settings(schema, schema, ""):
        default, meaning = meanings[key]
        kind = "size" if key.endswith("_bytes") else _type(definition, schema)
        cells = (f"`{key}`", kind, f"`{default}`" if default else "required", meaning)
        groups.setdefault(key.rpartition(".")[0], []).append(f"| {' | '.join(cells)} |")
    for group, rows in sorted(groups.items()):
        title = f"`{group}`" if group else "General"
        lines += ["", f"## {title}", "", meanings.get(group, ("", ""))[1], ""]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows]
    return "\n".join(lines) + "\n"


def _settings(model: dict[str, Any], schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, definition in model["properties"].items():
        below = _resolved(definition, schema)
        if "properties" in below:
            yield from _settings(below, schema, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", definition


def _resolved(definition: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    reference = definition.get("$ref")
    return schema["$defs"][reference.rpartition("/")[2]] if reference else definition


def _type(definition: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return the type of a setting in words, with its bounds."""
    if "anyOf" in definition:
        kinds = [_type(one, schema) for one in definition["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    definition = _resolved(definition, schema)
    if "enum" in definition or "const" in definition:
        return ", ".join(f"`{value}`" for value in definition.get("enum", [definition.get("const")]))
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    said = [f"{word} {definition[name]:g}" for name, word in bounds.items() if name in definition]
    kind = {"boolean": "true or false", "string": "text", "array": "list", "integer": "whole number"}
    found = definition.get("type", "object")
    return " ".join([kind.get(found, found), *said[:2]])


def _meanings(text: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (key, (default, comment)) of each setting of default.yaml, and of each group."""
    comment: list[str] = []
    groups: list[tuple[int, str]] = []
    above = ""  # the key whose comment also describes the keys that follow it without one
    for line in text.splitlines():
        found = KEY.fullmatch(line.rstrip())
        if not line.strip():
            comment, above = [], ""
        elif line.lstrip().startswith("#") and not line.startswith("# root: "):
            prose = line.strip().removeprefix("# ")
            if not prose.startswith(" ") and prose != "tenants:":  # else an example
                comment.append(prose)
        elif found:
            depth, name, default = len(found[1]), found[2], (found[3] or "").strip()
            groups = [group for group in groups if group[0] < depth]
            key = ".".join([*(name for _, name in groups), name])
            above = above if above and not comment else key
            meaning = " ".join(comment).replace("|", "\\|") if comment else f"see `{above}`"
            yield key, ("" if line.startswith("#") else default, meaning)
            groups.append((depth, name))
            comment = []


# --- the command line ---


def cli_page() -> str:
    """Return what `kvtier COMMAND --help` prints, for all commands."""
    lines = ["# Commands", "", "Generated from `kvtier COMMAND --help`.", "", "```text", _help(), "```"]
    for command in COMMANDS:
        lines += ["", f"## kvtier {command}", "", "```text", _help(*command.split()), "```"]
    return "\n".join(lines) + "\n"


def _help(*words: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        main([*words, "--help"])
    return printed.getvalue().strip()


# --- the REST interface ---


def rest_page() -> str:
    """Return the operations of the admin service, by its OpenAPI document."""
    document = make_routes(MagicMock()).openapi()
    lines = [
        "# REST API",
        "",
        "Generated from the OpenAPI document of `kvtier serve`, which the service itself answers at",
        "`/api/v1/openapi.json`. Errors are problems by RFC 9457 (`application/problem+json`). Where tokens are",
        "set, a request brings `Authorization: Bearer TOKEN`; a GET, and the lookup, need the read token, the rest the",
        "admin's.",
    ]
    for tag in document["tags"]:
        lines += ["", f"## {tag['name']}", "", tag["description"], ""]
        lines += ["| request | parameters and body | answer | |", "| --- | --- | --- | --- |"]
        for path, operations in document["paths"].items():
            for method in METHODS:
                if method in operations and tag["name"] in operations[method]["tags"]:
                    lines.append(_operation(method, path, operations[method]))
    lines += ["", "## Bodies and answers", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += [f"### {name}", ""]
        if "properties" in schema:
            lines += ["| field | type | |", "| --- | --- | --- |"]
            for key, value in schema["properties"].items():
                lines.append(f"| `{key}` | {_json_type(value)} | {value.get('description', '')} |")
            lines.append("")
        else:
            lines += [_json_type(schema), ""]
    return "\n".join(lines)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    given = [f"`{parameter['name']}`" for parameter in operation.get("parameters", ())]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    given += [_json_type(body)] if body else []
    done = next(status for status in operation["responses"] if status.startswith("2"))
    content = operation["responses"][done].get("content", {}).get("application/json", {}).get("schema")
    answer = f"{done} {_json_type(content)}" if content else done
    about = " ".join(operation.get("description", operation["summary"]).split())
    return f"| `{method.upper()} {path}` | {', '.join(given)} | {answer} | {about} |"


def _json_type(schema: dict[str, Any]) -> str:
    """Return a JSON schema in a few words; another schema of the document is a link to its table."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(_json_type(one) for one in schema.get("anyOf") or schema["oneOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_json_type(schema.get('items', {}))}"
    extra = schema.get("additionalProperties")
    if schema.get("type") == "object" and isinstance(extra, dict):
        return f"mapping to {_json_type(extra)}"
    return str(schema.get("type", "any"))
