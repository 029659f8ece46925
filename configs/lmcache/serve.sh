#!/bin/sh
# LMCache's multi-process server with kvtier as its L2: what leaves its memory stays in kvtier's segments, for every
# server on the same root and after a restart. kvtier.yaml has the settings. In LMCache's environment, from kvtier's
# checkout (an index in Redis needs './kvtier[redis]'):
#
#   pip install lmcache==0.5.6 ./kvtier
#
# pip resolves that (Python 3.11, November 2026). Tests run LMCache's server and client on a CPU, without the packages of
# its CUDA build.
#
# A setting that is wrong, or a root that can't be written, stops the server's start; LMCache's log says which and why.
# kvtier evicts by its own capacity and quotas, so LMCache is given neither "max_capacity_gb" nor "eviction"; with both,
# LMCache deletes by what it counts itself, which starts at nothing with each server.
#
# The engine, as LMCache's documentation has it (this part has not been run from here):
#
#   vllm serve MODEL --kv-transfer-config '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
#       "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector"}'

exec lmcache server --host 127.0.0.1 --port 5555 --http-host 127.0.0.1 --http-port 8080 \
    --l1-size-gb 60 --eviction-policy LRU \
    --l2-adapter '{"type": "native_plugin", "module_path": "kvtier.connectors.lmcache",
        "class_name": "KVTierConnector", "adapter_params": {"config": "/etc/kvtier/kvtier.yaml"}}'
