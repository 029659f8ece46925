"""The site of docs/: it builds without a warning, and its tables name what the code has."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.model.config_json import FAMILIES, REFUSED

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Prose that docs/ must not have: words by which a reader looks for a noun in vain (LAYOUT, language rule 3).
BANNED = re.compile(r"\b(nobody|somebody|whoever|anybody|meanwhile|is told|lets go|left alone)\b", re.IGNORECASE)
PROSE = [
    *(
        ROOT / name
        for name in ("README.md", "SECURITY.md", "configs/README.md", "benchmarks/README.md", "configs/default.yaml")
    ),
    *sorted(DOCS.rglob("*.md")),
]


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert built.returncode == 0, built.stderr
    settings, rest, cli = (
        (tmp_path / "site" / name).read_text() for name in ("settings.html", "rest.html", "cli.html")
    )
    assert "--dry-run" in cli and cli.count("Usage: kvtier") == 20
    assert "capacity.ttl_s" in settings and "64GiB" in settings
    assert "/api/v1/lookup" in rest and "LookupAnswer" in rest
    assert not BANNED.findall(settings + rest)


def test_every_error_that_stops_a_start_is_in_troubleshooting() -> None:
    """By its key, as the error names it. Options of commands, which begin with dashes, say their fix on the spot."""
    page = (DOCS / "troubleshooting.md").read_text()
    sources = [path for folder in ("kvtier", "connectors", "server") for path in (ROOT / folder).rglob("*.py")]
    keys = {key for path in sources for key in error_keys(path.read_text())} - {"lora"}  # caught: not cached
    keys = {key for key in keys if not key.startswith("--")}
    assert len(keys) > 50 and not [key for key in sorted(keys) if f"`{key}`" not in page]


def test_the_warnings_in_troubleshooting_are_those_of_the_code() -> None:
    """The page quotes words of each. What Redis says of its memory is not kvtier's."""
    page = (DOCS / "troubleshooting.md").read_text().partition("## Warnings in the log")[2]
    quoted = {
        words
        for row in page.splitlines()
        if row.startswith("| `")
        for words in re.findall("`(.+?)`", row.split("|")[1])
    }
    sources = [path for folder in ("kvtier", "connectors") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text()))]
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    texts = "\n".join(str(node.value) for node in nodes if isinstance(node, ast.Constant) and node not in docstrings)
    assert len(quoted) > 15 and [words for words in quoted if words not in texts] == ["used memory > 'maxmemory'"]


def error_keys(source: str) -> list[str]:
    """Return the literal keys of the ConfigErrors that are made; those of a loop are the texts that it goes over."""
    found: list[str] = []
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "ConfigError"]
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    for call in calls:
        key = call.args[0]
        if isinstance(key, ast.Constant):
            found.append(key.value)
        for loop in loops:
            if isinstance(key, ast.Name) and ast.unparse(loop.target) == key.id and call in ast.walk(loop):
                found += ast.literal_eval(loop.iter)
    return found


def test_the_models_page_has_each_model_type_with_its_verdict() -> None:
    rows = [line.split("|")[2:4] for line in (DOCS / "models.md").read_text().splitlines() if "`" in line]
    verdicts = {kind: row[1].strip() for row in rows if len(row) == 2 for kind in re.findall(r"`([\w-]+)`", row[0])}
    for kind in FAMILIES:
        assert verdicts.get(kind, "").startswith("works"), kind
    for kind in REFUSED:
        assert verdicts.get(kind, "").startswith("refused"), kind


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_prose(page: Path) -> None:
    assert not BANNED.findall(page.read_text())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
