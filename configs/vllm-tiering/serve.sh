#!/bin/sh
# vLLM's own OffloadingConnector with kvtier behind its CPU tier, for who has to use that connector: what leaves the CPU
# tier stays in kvtier's segments, for every engine on the same root and after a restart. kvtier.yaml has the settings.
# vLLM 0.32 or later, and a GPU, which OffloadingConnector needs; in vLLM's environment, from kvtier's checkout:
#
#   pip install .                (with an index in Redis: '.[redis]')
#   MODEL=/models/llama-3.1-8b configs/vllm-tiering/serve.sh [vLLM's arguments]
#
# MODEL is a folder, whose weights are fingerprinted; for a name on a hub set model_tag in kvtier.yaml. A setting that is
# wrong, or a root that can't be written, stops the engine's start with its name and what to do.
#
# cpu_bytes_to_use is the CPU tier's, of all workers together: every load passes through it. block_size, in tokens, is
# what is stored as one object. Settings may stand in "settings": {...} beside or instead of "config".

exec vllm serve "${MODEL:?the folder of a model}" --kv-transfer-config '{
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 68719476736, "block_size": 256,
        "secondary_tiers": [{"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm_tiering",
            "config": "/etc/kvtier/kvtier.yaml"}]}}' "$@"
