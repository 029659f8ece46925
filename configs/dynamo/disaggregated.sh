#!/usr/bin/env bash
# Dynamo's frontend with its KV router; workers that prefill and workers that decode. NIXL hands a request's KV from one
# to the other, and the prefill workers load from kvtier what is stored and save what they compute.
#
#   MODEL=/models/llama-3.1-70b KVTIER_CONFIG=/etc/kvtier/kvtier.yaml configs/dynamo/disaggregated.sh [vLLM's arguments]
#
# MODEL, NAME, KVTIER_CONFIG, KVTIER_ROOT, DEVICE, GPUS, PYTHON, HTTP_PORT, STORE, RUN: as in aggregated.sh
# PREFILL, DECODE   how many workers of each on this machine (1 and 1)
# HOST              this machine's address, by which the other workers fetch KV from it (127.0.0.1)
# NIXL_PORT         and the ones after it: of each worker (5600)
#
# What it needs besides: nixl (`pip install nixl` brings UCX; the CPU goes by TCP or shared memory).

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.sh"

export VLLM_NIXL_SIDE_CHANNEL_HOST=${HOST:-127.0.0.1}
nixl='{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
# Dynamo asks the one child that hands KV on (NixlConnector) for a request's parameters. kvtier comes after it: a request
# whose KV another worker hands on is not looked up, and one to be prefilled is, for NixlConnector has nothing of it.
both="{\"kv_connector\": \"MultiConnector\", \"kv_role\": \"kv_both\", \"kv_load_failure_policy\": \"recompute\",
    \"kv_connector_extra_config\": {\"connectors\": [$nixl, {\"kv_connector\": \"KVTierConnector\", \"kv_role\": \"kv_both\", $kvtier}]}}"

# vLLM turns its hybrid cache manager off where kvtier is, and NIXL refuses to transfer between engines that differ in it.
set -- --disable-hybrid-kv-cache-manager "$@"

[ "$http_port" = 0 ] || start_frontend
number=0
for kind in prefill decode; do
    workers=${PREFILL:-1} transfer=$both
    [ $kind = prefill ] || { workers=${DECODE:-1} transfer=$nixl; }
    for place in $(seq "$workers"); do
        number=$((number + 1))
        export VLLM_NIXL_SIDE_CHANNEL_PORT=$((${NIXL_PORT:-5600} + number))
        start_worker "$kind-$place" "$number" --disaggregation-mode $kind --kv-transfer-config "$transfer" "$@"
    done
done
wait_for_an_end
