#!/bin/bash
# Puts a later release of vLLM into the bundle that run_h200.sh unpacks, which has 0.25.1: the newest built for the torch
# 2.11 of those hosts. What later releases compile keeps to torch's stable ABI, so that it loads there, and their Python
# files run with torch 2.11: 0.32.0 did on an H200, whose first start took more than a minute. Without the peers, to stay
# within what a call can carry.
#
#   benchmarks/gpu/later_vllm.sh .carry .carry-032 0.32.0
#
# Arguments: the parts there are, where the new ones go, the release.
set -euo pipefail
from=$1 to=$(mkdir -p "$2" && cd "$2" && pwd) release=$3
# What 0.32 imports that 0.25.1 does not, or in another version.
packages=$(grep -E '^(apache-tvm-ffi|oss-harmony|py-cpuinfo|xgrammar)==' requirements/engine-cpu.txt)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat "$from"/*/part-* | xz -dT0 | tar xf - -C "$work" site
rm -rf "$work"/site/vllm "$work"/site/vllm-*
platforms="--only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none"
for minor in 35 34 31 28 27 24 17; do platforms="$platforms --platform manylinux_2_${minor}_x86_64"; done
platforms="$platforms --platform manylinux2014_x86_64 --platform any"
python3 -m pip install -q --no-deps --no-compile --upgrade $platforms --target "$work/site" $packages
python3 -m pip download -q --no-deps $platforms -d "$work" "vllm==$release"
python3 - "$work" << 'END'
import sys, zipfile
from pathlib import Path

work = Path(sys.argv[1])
# Of what is compiled: the operators, FlashAttention 3 for Hopper, FlashMLA and the file tier of vLLM's own tiering.
wanted = ("_C_stable_libtorch", "_vllm_fa3_C", "_flashmla_", "cumem_allocator", "fs_io_C", "spinloop")
large = ("vllm/third_party/deep_gemm/include/", "vllm/third_party/fmha_sm100/", "vllm/vllm-rs",
         "vllm/model_executor/layers/fused_moe/configs/")
(wheel,) = work.glob("vllm-*.whl")
with zipfile.ZipFile(wheel) as files:
    names = [name for name in files.namelist() if not name.startswith(large)]
    kept = [name for name in names if not name.endswith(".so") or Path(name).name.startswith(wanted)]
    files.extractall(work / "site", kept)
END
find "$work/site/vllm" -name '*.so' -size +1M -exec strip --strip-debug {} +
tar cf - -C "$work" site | xz -3 -T0 > "$work/bundle.tar.xz"
rm -rf "${to:?}"/*
(cd "$work" && split -b 44000000 -d bundle.tar.xz part-)
for part in "$work"/part-*; do mkdir -p "$to/${part##*-}" && mv "$part" "$to/${part##*-}/"; done
du -ah "$to" | sort
