"""Stands in for aiperf where only what is done with its output is tested: leaves files that aiperf 0.13.0 once wrote.

Takes aiperf's arguments. Both files were written by it against vLLM 0.32.0 on a CPU (benchmarks/serving, a model of
eight layers, a prefix of 1,024 tokens, one request at a time): `cache.json` with kvtier, `nocache.json` without.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

RECORDED = Path(__file__).parent / "recorded"


def main() -> None:
    words = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    if os.environ.get("RECORDED_AIPERF_FAILS") in ("all", words["--prefix-prompt-length"]):
        sys.exit("aiperf: no such tokenizer")
    if left := os.environ.get("RECORDED_AIPERF_WAITS"):
        child = subprocess.Popen(["sleep", "300"])
        Path(left).write_text(str(child.pid))
        child.wait()
    with urlopen(words["--url"] + "/health") as answer:
        assert answer.status == 200
    folder = Path(words["--artifact-dir"])
    name = "cache" if "/cache/" in str(folder) else "nocache"
    (folder / "profile_export_aiperf.json").write_bytes((RECORDED / f"{name}.json").read_bytes())
    (folder / "arguments.json").write_text(json.dumps(sys.argv[1:]))


if __name__ == "__main__":
    main()
