"""`kvtier doctor`: every probe in turn, one verdict a line. Nothing here hangs for longer than its probes may."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from kvtier.config.settings import Settings, has_root_variable
from kvtier.doctor.gpu import examine_gpu, examine_memory
from kvtier.doctor.host import Diagnosis, Host
from kvtier.doctor.lustre import examine_efa
from kvtier.doctor.storage import examine_storage, with_capacity
from kvtier.errors import ConfigError
from kvtier.index.open import look_at_redis
from kvtier.io.native import instruction_set

LINE_WIDTH = 110


def examine(path: Path | None, peer: Path | None = None) -> Iterator[Diagnosis]:
    """Yield one verdict after the other. path: the root, or a settings file; None: the configured root, and where none
    is configured, storage is left out. peer: another mount of the root's file system, whose coherence is measured."""
    machine = Host()
    settings, fault = _settings(path)
    if fault is not None:
        yield fault
    yield Diagnosis("ok", "kvtier", f"native part for {instruction_set()}")
    yield from examine_gpu(machine, settings)
    yield from examine_memory(machine, settings.host.arena_bytes if settings else None)
    root = settings.root if settings else path if path is None or not path.is_file() else None
    if root is not None:
        yield from examine_storage(machine, root, settings, peer)
    else:
        yield from examine_efa(machine, on_lustre=False)
        fix = "correct the settings" if fault else "name the root: kvtier doctor PATH, or set KVTIER_ROOT"
        yield Diagnosis("warn", "storage", "not looked at", fix)
    yield _redis(settings)
    if settings is not None and settings.signing.key_file is not None:
        yield _signing(settings)


def _signing(settings: Settings) -> Diagnosis:
    try:
        signer = settings.signing.signer()
    except ConfigError as fault:
        return Diagnosis("bad", "signing", f"{fault.key} = {fault.value!r}", fault.fix)
    assert signer is not None
    return Diagnosis("ok", "signing", f"records are signed; the secret's fingerprint is {signer.fingerprint}")


def _redis(settings: Settings | None) -> Diagnosis:
    if settings is None or settings.index.kind != "redis":
        return Diagnosis("ok", "Redis", "not configured")
    try:
        seen = look_at_redis(settings)
    except ConfigError as fault:
        return Diagnosis("bad", "Redis", f"{settings.index.url}: {fault.key} = {fault.value!r} is refused", fault.fix)
    if not seen.does_answer:
        fix = "; ".join(filter(None, (seen.fix, "engines start, but every lookup is a miss until it answers")))
        return Diagnosis("warn", "Redis", f"at {seen.url}, which does not answer ({seen.said})", fix)
    if seen.warning:
        return Diagnosis("warn", "Redis", f"at {seen.url}, {seen.said}", seen.warning)
    return Diagnosis("ok", "Redis", f"at {seen.url}, {seen.said}")


def _settings(path: Path | None) -> tuple[Settings | None, Diagnosis | None]:
    """Load the settings that an engine would use, with `path` as its root or its settings file."""
    given = "root" if path is None or not path.is_file() else "config"
    is_by_root = has_root_variable() if path is None else given == "root"
    try:
        settings = Settings.load({given: str(path.absolute())} if path is not None else {})
        return with_capacity(settings) if is_by_root else settings, None
    except ConfigError as fault:
        if path is None and fault.key == "root" and fault.value is None:
            return None, None
        return None, Diagnosis("bad", "settings", f"{fault.key} = {fault.value!r}", fault.fix)


def line(verdict: Diagnosis) -> str:
    """Format a verdict, wrapped at LINE_WIDTH; the advice stands on a line of its own, to be copied."""
    text = fill(
        f"{verdict.level:<4}  {verdict.what}: {verdict.value}",
        LINE_WIDTH,
        subsequent_indent=" " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{text}\n      -> {verdict.fix}" if verdict.fix else text
