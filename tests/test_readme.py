"""README pages: tables equal benchmarks/results, links resolve, the map names every module."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables

ROOT = Path(__file__).resolve().parent.parent


def test_tables_are_those_of_the_results() -> None:
    command = [sys.executable, "-m", "benchmarks.tables", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0, "run python -m benchmarks.tables"


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError):
        tables.filled("<!-- table nothing -->\n<!-- end -->\n")


def test_a_table_is_filled_between_its_marks() -> None:
    text = tables.filled("before\n<!-- table demo -->\nstale\n<!-- end -->\nafter\n")
    assert text.startswith("before\n<!-- table demo -->\n**A second vLLM process**") and text.endswith(
        "<!-- end -->\nafter\n"
    )
    assert "stale" not in text and tables.filled(text) == text


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_table_is_in_a_page_and_has_rows(name: str) -> None:
    assert any(f"<!-- table {name} -->" in (ROOT / page).read_text() for page in tables.FILES)
    assert len([line for line in tables.TABLES[name]() if line.startswith("| ")]) > 2


PAGES = [ROOT / folder / "README.md" for folder in (".", "benchmarks", "configs", "kvtier", "tests")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Links name existing files, and headings in them."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert len(links) > 2
    for path, _, heading in (link.partition("#") for link in links):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not heading or heading in headings(target), f"{path}#{heading}"


def test_the_map_names_every_module() -> None:
    text = (ROOT / "kvtier" / "README.md").read_text()
    modules = [path for folder in ("kvtier", "connectors") for path in (ROOT / folder).rglob("*.py")]
    named = [path for path in modules if path.stem not in ("__init__", "__main__") and path.parent.name != "cli"]
    assert not [str(path.relative_to(ROOT)) for path in named if f"`{path.stem}`" not in text]
    assert len(text.splitlines()) <= 250


def test_results_that_the_code_cites_are_there() -> None:
    """A comment cited one under the name that it had before."""
    paths = [path for folder in ("kvtier", "connectors", "server") for path in (ROOT / folder).rglob("*.py")]
    cited = {name for path in paths for name in re.findall(r"benchmarks/results/[\w/.-]+\.json", path.read_text())}
    assert cited and not [name for name in sorted(cited) if not (ROOT / name).exists()]


def headings(page: Path) -> set[str]:
    """As GitHub names them in links."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}
