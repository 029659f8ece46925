"""`kvtier calibrate MODEL --out FILE`: make the table that the codecs tc4 and tc3 need."""

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvtier.cli.app import NotDone, app
from kvtier.cli.place import refuse_missing_model
from kvtier.cli.progress import progress
from kvtier.errors import ConfigError
from kvtier.runtime.exit_status import MEANINGS, OK

Texts = Annotated[
    list[Path] | None,
    Option(metavar="FILE", exists=True, dir_okay=False, help="Text to calibrate with; may be given again."),
]
Rows = Annotated[int, Option(metavar="N", min=1, help="Rows of 1,280 tokens of each kind of text, or of each file.")]


@app.command(epilog=MEANINGS)
def calibrate(
    model: Annotated[Path, Argument(metavar="MODEL", help="Folder of a checkpoint, with its tokenizer.")],
    out: Annotated[Path, Option(metavar="FILE", help="File of the table.")],
    text: Texts = None,
    rows: Rows = 4,
    device: Annotated[str, Option(help="As in torch: cpu or cuda.")] = "cpu",
) -> int:
    """Make the table of the codecs tc4 and tc3 for a model: minutes on a GPU, and for small models on a CPU.

    It needs transformers. Without --text it takes prose, code, tables and dialogue that packages and the system of this
    machine hold. Give texts that are like what is served: the codecs lose most on kinds that they have not seen.
    """
    _check(model, out)
    from kvtier.codecs.transform.calibrate import table_tensors
    from kvtier.codecs.transform.model_statistics import PREFIX_TOKENS, TEXT_TOKENS, CalibratedModel, default_rows
    from kvtier.codecs.transform.table import write_table
    from kvtier.model.weights_fingerprint import weights_fingerprint

    weights = weights_fingerprint(model, None)
    loaded = CalibratedModel.load(model, device)
    if text:
        n_tokens, found = PREFIX_TOKENS + TEXT_TOKENS, []
        for path in text:
            ids = loaded.tokens(path.read_text(errors="replace"))
            found += [ids[i * n_tokens : (i + 1) * n_tokens] for i in range(min(rows, len(ids) // n_tokens))]
    else:
        found = default_rows(loaded, rows)
    if not found:
        raise NotDone("no text has 1,280 tokens: give longer files with --text")
    with progress("Calibrating", "rows") as show:
        frequencies = loaded.frequencies(found[0])
        statistics = loaded.statistics(found, frequencies, show)
    write_table(out, table_tensors(*statistics, frequencies), model.resolve().name, weights)
    print(f"{out}: table of {model.resolve().name} from {len(found)} rows of text; set codec_table to its path")
    return OK


def _check(model: Path, out: Path) -> None:
    """Refuse what would else fail after minutes of work. Raises ConfigError."""
    refuse_missing_model(model)
    from kvtier.model.weights_fingerprint import is_weight_file

    if not any(map(is_weight_file, os.listdir(model))):
        raise ConfigError("model", str(model), "there are no weight files; name the folder of a whole checkpoint")
    if out.is_dir():
        raise ConfigError("--out", str(out), "it is a folder; name a file")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise ConfigError("--out", str(out), f"{out.parent} is no folder, or not writable; name another")
