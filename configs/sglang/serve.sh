#!/bin/sh
# SGLang with kvtier below HiCache's host memory: what leaves that stays in kvtier's segments, for every engine on the
# same root and after a restart. kvtier.yaml has the settings, and must have a model_tag. In SGLang's environment, from
# kvtier's checkout (an index in Redis needs '.[redis]'):
#
#   pip install .
#   MODEL=/models/llama-3.1-8b configs/sglang/serve.sh [SGLang's arguments]
#
# This command has not been run from here, for SGLang's engine needs a GPU; its factory, its abstract class and its host
# pools, of 0.5.23, have been run with kvtier on a CPU. A setting that is wrong, a root that can't be written, or a model
# whose KV kvtier does not keep stops the start with its name and what to do.
#
# A page of --page-size tokens is stored as one object: larger pages are read faster, and less of a prompt's end is kept.
# "prefetch_threshold" and the other keys of SGLang's prefetching go beside "config"; kvtier's own settings may stand in
# "settings": {...} beside or instead of it.

exec python -m sglang.launch_server --model-path "${MODEL:?the folder of a model}" --page-size 64 \
    --enable-hierarchical-cache --hicache-ratio 2 --hicache-mem-layout page_first \
    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvtier",
        "module_path": "kvtier.connectors.sglang", "class_name": "KVTierHiCache", "interface_v1": 1,
        "config": "/etc/kvtier/kvtier.yaml"}' "$@"
