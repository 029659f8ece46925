#!/usr/bin/env bash
# Dynamo's frontend with its KV router, and vLLM workers that share one root of kvtier. No etcd, no NATS.
#
#   MODEL=/models/llama-3.1-8b KVTIER_CONFIG=/etc/kvtier/kvtier.yaml configs/dynamo/aggregated.sh [vLLM's arguments]
#
# MODEL           the model's folder; NAME is what it is served as
# KVTIER_CONFIG   kvtier's settings; or KVTIER_ROOT alone. Workers on other nodes need an index in Redis
# DEVICE          gpu or cpu; GPUS, of each worker (1): worker n has the n-th so many of the machine
# WORKERS         how many on this machine (2); FIRST, the number of the first one (1)
# PYTHON          of an environment with ai-dynamo, vLLM and kvtier
# HTTP_PORT       of the frontend (8000); 0: none here, only workers, which find one by STORE
# STORE           the folder by which all processes find each other (DYN_FILE_KV), on a file system that all see
# RUN             where logs and process numbers go: frontend.log, worker-1.log, worker-1.pid, ...
#
# Runs until it is interrupted, and ends what it started. Status 1: a process ended by itself.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.sh"

workers=${WORKERS:-2} first=${FIRST:-1}
[ "$http_port" = 0 ] || start_frontend
for number in $(seq "$first" $((first + workers - 1))); do
    start_worker "worker-$number" "$number" \
        --kv-transfer-config "{\"kv_connector\": \"KVTierConnector\", \"kv_role\": \"kv_both\", $kvtier}" "$@"
done
wait_for_an_end
