"""The style rules as a test: sizes, import direction, and what may stand only in one place. There is no exemptions list
for sizes; a new module has to be given its layer here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
CLASS_FIELDS_MAX = 15
PARAMETERS_MAX = 6

# Each row may import its own and the rows below it. Folders stand for all their modules.
LAYERS = (
    ("benchmarks", "kvtier.cli"),
    ("kvtier.connectors", "kvtier.server"),
    ("kvtier.build", "kvtier.admin", "kvtier.doctor", "kvtier.planner"),
    ("kvtier.scheduler", "kvtier.worker", "kvtier.maintenance", "kvtier.weights"),
    ("kvtier.arena", "kvtier.codecs", "kvtier.eviction", "kvtier.index", "kvtier.io", "kvtier.kernels", "kvtier.model")
    + ("kvtier.plan", "kvtier.storage"),
    ("kvtier._bootstrap", "kvtier.config", "kvtier.errors", "kvtier.format", "kvtier.runtime"),
)
LAST_APART = 1  # last row whose members must not import each other
# module -> what it may not reach, however many imports lie between.
NEVER_REACHES = {
    "kvtier.scheduler.store": (
        "torch",
        "kvtier.worker.transfer",
        "kvtier.worker.saving",
        "kvtier.worker.loads",
        "kvtier.worker.loop",
        "kvtier.worker.context",
    ),
    "kvtier.worker.transfer": (
        "kvtier.scheduler.store",
        "kvtier.scheduler.background",
        "kvtier.maintenance.sweeper",
        "kvtier.eviction",
        "kvtier.scheduler.segment_allocator",
    ),
}
USES_TORCH = ("benchmarks", "kvtier.connectors", "kvtier.build", "kvtier.worker", "kvtier.kernels", "kvtier.codecs")
USES_TORCH += ("kvtier.arena.arena", "kvtier.weights")
# benchmarks set that of the engines that they start
READS_THE_ENVIRONMENT = ("kvtier.config.settings", "kvtier.connectors.vllm.plugin", "benchmarks")
STARTS_THREADS = ("kvtier.runtime.threads", "benchmarks")
CATCHES_EVERYTHING = ("kvtier.connectors.faults", "kvtier.runtime.threads")  # the latter passes on to who waits
# The base class (of the engine, of asyncio) has them; any method is wrapped.
OVERRIDES_OPEN_SIGNATURES = ("kvtier.connectors.vllm", "kvtier.connectors.faults", "kvtier.server.connections")
ENGINES_AND_WEB = ("vllm", "lmcache", "dynamo", "fastapi", "starlette", "uvicorn")
MAY_USE_THEM = ("benchmarks", "kvtier.connectors", "kvtier.server")

FIRST_WORDS = {"What", "Who", "Whose", "Whether", "Which", "How", "Where", "When"}
FIRST_WORDS |= {"Of", "From", "Those", "That", "As", "So", "Until", "Beside"}
NOT_IN_PROSE = re.compile(
    r"\b(nobody|somebody|whoever|anybody|meanwhile|(is|are) told|lets? go|left alone|lies?)\b", re.IGNORECASE
)

THREAD_STARTERS = ("Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "start_new_thread")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")


@dataclass(frozen=True)
class Source:
    """One Python file: the name it is imported by, its text and its tree."""

    name: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, name: str, text: str) -> Source:
        return cls(name, text, ast.parse(text))


def within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def sources() -> list[Source]:
    """Return all modules, by the names that pyproject.toml gives them."""
    folders = {
        "kvtier": "kvtier",
        "connectors": "kvtier.connectors",
        "server": "kvtier.server",
        "benchmarks": "benchmarks",
    }
    found = []
    for folder, package in folders.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found.append(Source.of(".".join((package, *parts)), path.read_text()))
    return found


def imports(source: Source) -> Iterator[str]:
    """Full names of what a module imports; `from a import b` gives a.b, which may be a module or a name in one."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.name}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# --- sizes ---


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: prose is not rationed."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def function_faults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if body_lines(node) > FUNCTION_LINES_MAX:
        yield f"{node.name}: {body_lines(node)} lines"
    arguments = node.args
    names = [x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    # Typer makes options of a command's parameters, as a settings model has a field for each key.
    is_free = any("jit" in decorator or ".command(" in decorator for decorator in decorators)
    if len([name for name in names if name not in ("self", "cls")]) > PARAMETERS_MAX and not is_free:
        yield f"{node.name}: {len(names)} parameters, group them in a dataclass"


def class_faults(node: ast.ClassDef) -> Iterator[str]:
    """Fields of a dataclass and what methods assign to self. A settings model is a table of keys, and not counted."""
    fields = {
        x.attr
        for x in ast.walk(node)
        if isinstance(x, ast.Attribute)
        and isinstance(x.ctx, ast.Store)
        and isinstance(x.value, ast.Name)
        and x.value.id == "self"
    }
    if any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list):
        fields |= {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
    if len(fields) > CLASS_FIELDS_MAX:
        yield f"{node.name}: {len(fields)} fields"


def size_faults(source: Source) -> Iterator[str]:
    n_lines = source.text.count("\n")
    if n_lines > FILE_LINES_MAX:
        yield f"{n_lines} lines"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from function_faults(node)
        elif isinstance(node, ast.ClassDef):
            yield from class_faults(node)


# --- what may stand only in one place ---


def is_reraised(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def handler_faults(handler: ast.ExceptHandler, name: str) -> Iterator[str]:
    assert handler.type is not None, "ruff refuses a bare except"
    caught = {x.id for x in ast.walk(handler.type) if isinstance(x, ast.Name)}
    if caught & {"Exception", "BaseException"} and not is_reraised(handler) and not within(name, CATCHES_EVERYTHING):
        yield f"line {handler.lineno}: catches everything"


def place_faults(source: Source) -> Iterator[str]:
    name = source.name
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            yield from handler_faults(node, name)
        elif isinstance(node, ast.arguments) and node.kwarg is not None and not within(name, OVERRIDES_OPEN_SIGNATURES):
            yield f"line {node.kwarg.lineno}: **{node.kwarg.arg} hides what is taken"
        elif isinstance(node, ast.Attribute | ast.Name):
            word = node.attr if isinstance(node, ast.Attribute) else node.id
            if word in ("environ", "environb", "getenv", "putenv") and not within(name, READS_THE_ENVIRONMENT):
                yield f"line {node.lineno}: reads the environment"
            if word in THREAD_STARTERS and not within(name, STARTS_THREADS):
                yield f"line {node.lineno}: starts threads"
    for match in UNFINISHED.finditer(source.text):
        yield f"{match[0]} without an issue's number"


# --- prose ---


def docstring_of(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None


def prose_faults(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if re.split(r"\W", text, maxsplit=1)[0] in FIRST_WORDS:
                yield f"docstring begins with {text.split()[0]}: {text.splitlines()[0]}"
    for one, next_one in zip(source.tree.body, source.tree.body[1:], strict=False):
        if isinstance(one, ast.Assign | ast.AnnAssign) and docstring_of(next_one):
            yield f"line {next_one.lineno}: a comment beside the constant, not a docstring below it"
    for number, line in enumerate(source.text.splitlines(), 1):
        yield from (f"line {number}: {match[0]}" for match in NOT_IN_PROSE.finditer(line))


# --- import direction ---


def layer(name: str) -> int | None:
    return next((number for number, places in enumerate(LAYERS) if within(name, places)), None)


def import_faults(source: Source) -> Iterator[str]:
    name = source.name
    own = layer(name)
    if own is None and name != "kvtier":
        yield "has no layer: give it one in LAYERS"
        return
    for imported in imports(source):
        if within(imported, ("torch",)) and not within(name, USES_TORCH):
            yield "imports torch"
        if within(imported, ENGINES_AND_WEB) and not within(name, MAY_USE_THEM):
            yield f"imports {imported}: no engine and no web framework in the library"
        target = layer(imported)
        if own is None or target is None:
            continue
        if target < own:
            yield f"imports {imported}, which lies above it"
        of_one = any(within(name, (x,)) and within(imported, (x,)) for x in LAYERS[own])
        if own == target and own <= LAST_APART and not of_one:
            yield f"imports {imported}, which lies beside it"


def reach_faults(modules: list[Source]) -> Iterator[str]:
    graph = {source.name: set(imports(source)) for source in modules}
    for start, forbidden in NEVER_REACHES.items():
        visited: set[str] = set()
        reached: set[str] = set()
        waiting = [start]
        while waiting:
            name = waiting.pop()
            if name in visited:
                continue
            visited.add(name)
            for imported in graph.get(name, ()):
                reached.add(imported)
                # `from a import b` may mean the module a.b or a name in a.
                waiting += [part for part in (imported, imported.rpartition(".")[0]) if part in graph]
        yield from (f"{start} reaches {place}" for place in forbidden if any(within(x, (place,)) for x in reached))


def folder(name: str) -> str:
    """Return the folder that a module is in; a module directly in the package stands for itself."""
    return ".".join(name.split(".")[:2])


def folder_cycles(modules: list[Source]) -> list[str]:
    """Return the folders that import each other, over any number of steps. Imports within functions count."""
    names = {folder(source.name) for source in modules if source.name.startswith("kvtier.")}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for source in modules:
        if folder(source.name) in names:
            graph[folder(source.name)] |= {folder(x) for x in imports(source)} & names - {folder(source.name)}

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    return sorted(name for name in names if name in reached(name))


# --- the tests ---

MODULES = sources()


def all_faults(source: Source) -> list[str]:
    return [*size_faults(source), *place_faults(source), *import_faults(source)]


@pytest.mark.parametrize("source", MODULES, ids=lambda source: source.name)
def test_module(source: Source) -> None:
    assert all_faults(source) == []


def test_no_two_folders_import_each_other() -> None:
    assert folder_cycles(MODULES) == []


def test_a_planted_cycle_is_found() -> None:
    modules = [
        Source.of("kvtier.io.ring", "def f():\n from kvtier.storage.root import Root"),
        Source.of("kvtier.storage.root", "import kvtier.index.base"),
        Source.of("kvtier.index.base", "from kvtier.io import ring"),
        Source.of("kvtier.config.settings", "from kvtier.errors import ConfigError"),
        Source.of("kvtier.errors", ""),
    ]
    assert folder_cycles(modules) == ["kvtier.index", "kvtier.io", "kvtier.storage"]


def test_who_must_never_reach_whom() -> None:
    assert set(NEVER_REACHES) <= {source.name for source in MODULES}
    assert list(reach_faults(MODULES)) == []


@pytest.mark.parametrize("source", MODULES, ids=lambda source: source.name)
def test_prose(source: Source) -> None:
    assert list(prose_faults(source)) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('"""What is kept."""', "begins with What"),
        ('def f():\n """Whether it fits."""', "begins with Whether"),
        ('A = 1\n"""Bytes of a page."""', "beside the constant"),
        ("a = 1  # nobody waits", "nobody"),
        ("# the file lies in the root", "lies"),
    ],
)
def test_planted_prose_is_found(text: str, fault: str) -> None:
    assert any(fault in found for found in prose_faults(Source.of("kvtier.x", text)))


@pytest.mark.parametrize("path", sorted((ROOT / "kvtier").rglob("*.[ch]*pp")), ids=lambda path: path.name)
def test_native_file(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES_MAX
    assert max(map(len, text.splitlines())) <= 120
    assert not UNFINISHED.search(text)


PLANTED = {
    "kvtier.scheduler.store": {
        "x = 1\n" * 601: "601 lines",
        "def f():\n" + "    x = 1\n" * 70: "f: 71 lines",
        "def f(a, b, c, d, *, e, f, g): ...": "f: 7 parameters",
        "def f(**options): ...": "hides what is taken",
        "class C:\n def f(self):\n" + "".join(f"  self.a{n} = 1\n" for n in range(16)): "C: 16 fields",
        "@dataclass\nclass C:\n" + "".join(f" a{n}: int\n" for n in range(16)): "C: 16 fields",
        "try:\n f()\nexcept (OSError, Exception):\n pass": "catches everything",
        "import os\nos.environ['x']": "reads the environment",
        "from os import getenv\ngetenv('x')": "reads the environment",
        "import threading\nthreading.Thread(target=f).start()": "starts threads",
        "x = 1  # TODO later": "TODO without an issue's number",
        "import torch": "imports torch",
        "from torch import nn": "imports torch",
        "import vllm.config": "no engine and no web framework",
        "from kvtier.connectors import bridge": "which lies above it",
        "def f():\n from kvtier.build import open_store": "which lies above it",
    },
    "kvtier.format.record": {"from kvtier.io import ring": "which lies above it"},
    "kvtier.server.app": {"from kvtier.connectors.bridge import Bridge": "which lies beside it"},
    "kvtier.brand_new": {"": "has no layer"},
}


@pytest.mark.parametrize(("name", "text", "fault"), [(n, t, f) for n, rows in PLANTED.items() for t, f in rows.items()])
def test_planted_fault_is_found(name: str, text: str, fault: str) -> None:
    assert any(fault in found for found in all_faults(Source.of(name, text)))


def test_planted_reach_is_found() -> None:
    chain = {
        "kvtier.scheduler.store": "from kvtier import index",
        "kvtier.index": "from kvtier.codecs.raw import RawCodec",
        "kvtier.codecs.raw": "import torch",
    }
    modules = [Source.of(name, text) for name, text in chain.items()]
    assert list(reach_faults(modules)) == ["kvtier.scheduler.store reaches torch"]


def test_what_is_allowed_is_allowed() -> None:
    fine = [
        ("kvtier.runtime.threads", "import threading\nthreading.Thread(target=f)"),
        ("kvtier.config.settings", "import os\nos.environ"),
        ("kvtier.scheduler.store", "try:\n f()\nexcept BaseException:\n log()\n raise"),
        ("kvtier.scheduler.store", "import threading\nlock = threading.Lock()  # TODO(#12)"),
        ("kvtier.connectors.faults", "try:\n f()\nexcept Exception:\n pass"),
        ("kvtier.kernels.gather", "import torch\n@triton.jit\ndef f(a, b, c, d, e, f, g, h): ..."),
        ("kvtier.scheduler.store", "from kvtier.config.settings import Settings\nfrom kvtier.index.base import Index"),
    ]
    for name, text in fine:
        assert all_faults(Source.of(name, text)) == []


def test_format_is_skipped_only_in_tables_and_kernels() -> None:
    """LAYOUT 4: at most 60 in the whole tree."""
    folders = ("kvtier", "connectors", "server", "benchmarks", "tests")
    texts = {path: path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    counts = {str(path): len(re.findall(r"# fmt: skip$", text, re.MULTILINE)) for path, text in texts.items()}
    assert sum(counts.values()) <= 60, {path: count for path, count in counts.items() if count}


def test_no_two_classes_share_a_name() -> None:
    """LAYOUT 1: a class name that is searched for leads to one place."""
    places: dict[str, list[str]] = {}
    for source in MODULES:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(source.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
