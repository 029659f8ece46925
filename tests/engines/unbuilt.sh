#!/bin/bash
# Runs tests/engines and the demo with a release of vLLM that has no build for CPUs yet: the Python files of its wheel,
# with the compiled ones of the build that .venv holds. That works as long as the operators of both are alike. From the
# repository's root, after `make setup-dev`:
#
#   tests/engines/unbuilt.sh 0.33.0 [FOLDER]
set -euo pipefail
release=${1:?which release of vLLM, such as 0.33.0}
folder=${2:-build/vllm-$release}
python=$PWD/.venv/bin/python
[ -x "$python" ] || { echo "make setup-dev comes first"; exit 2; }
mkdir -p "$folder"
"$python" -m pip download -q --no-deps "vllm==$release" -d "$folder"
"$python" - "$folder" "$release" << 'END'
import importlib.util, shutil, sys, zipfile
from pathlib import Path

folder, release = Path(sys.argv[1]), sys.argv[2]
site = folder / "site"
shutil.rmtree(site, ignore_errors=True)
(wheel,) = folder.glob(f"vllm-{release}-*.whl")
with zipfile.ZipFile(wheel) as files:
    files.extractall(site, [name for name in files.namelist() if not name.endswith(".so")])
built = Path(importlib.util.find_spec("vllm").origin).parent
for compiled in built.glob("*.so"):
    shutil.copy(compiled, site / "vllm")
for path in (site / "vllm/_version.py", site / f"vllm-{release}.dist-info/METADATA"):  # by which vLLM knows CPU builds
    path.write_text(path.read_text().replace(release, f"{release}+cpu", 1))
(site / f"vllm-{release}.dist-info").rename(site / f"vllm-{release}+cpu.dist-info")
END
export PYTHONPATH=$(realpath "$folder")/site
"$python" -c "import vllm; print(f'vLLM {vllm.__version__} in {vllm.__file__}')"
"$python" -m pytest -q -n "${PYTEST_WORKERS:-2}" --dist loadfile tests/engines
"$python" -m benchmarks.demo --output "$folder/demo"
