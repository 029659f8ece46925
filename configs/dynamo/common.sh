# What the scripts beside this one have in common; they say what the variables are. Not run by itself.

: "${MODEL:?MODEL is the folder of the model}"
name=${NAME:-$(basename "$MODEL")}
python=${PYTHON:-python3}
device=${DEVICE:-gpu}
gpus=${GPUS:-1}
http_port=${HTTP_PORT:-8000}
events_port=${EVENTS_PORT:-20080} # and the ones after it: of each worker's KV events
system_port=${SYSTEM_PORT:-19090} # and the ones after it: of each worker's /metrics
run=${RUN:-$PWD/dynamo-run}
mkdir -p "$run"

export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=${STORE:-$run/store} DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq
[ -n "${KVTIER_CONFIG:-}${KVTIER_ROOT:-}" ] || { echo "set KVTIER_CONFIG or KVTIER_ROOT" >&2; exit 2; }

# Of a --kv-transfer-config, but for the role. A chunk that cannot be loaded is computed, instead of ending its request.
kvtier='"kv_connector_module_path": "kvtier.connectors.vllm", "kv_load_failure_policy": "recompute"'

case $device in
gpu) vllm=(-m dynamo.vllm) ;;
cpu)
    vllm=("$here/vllm_cpu.py")
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-4} VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
    set -- --block-size 32 "$@" # attention on the CPU takes multiples of 32
    ;;
*) echo "DEVICE is gpu or cpu, not $device" >&2; exit 2 ;;
esac

started=()
stop_all() {
    trap - EXIT INT TERM
    [ ${#started[@]} = 0 ] || kill -TERM "${started[@]}" 2>/dev/null || true
    wait
}
trap stop_all EXIT
trap 'exit 0' INT TERM

start() { # NAME COMMAND...
    local label=$1
    shift
    "$@" >"$run/$label.log" 2>&1 &
    started+=($!)
    echo $! >"$run/$label.pid"
    echo "$label: process $!, $run/$label.log"
}

# The router's own options go into ROUTER, such as ROUTER="--router-disk-cache-hit-weight 0.5".
start_frontend() {
    # shellcheck disable=SC2086
    start frontend "$python" -m dynamo.frontend --http-port "$http_port" --router-mode kv ${ROUTER:-}
}

# A worker has an endpoint of its own for the KV events of its cache and of the tier, by which the router knows both.
start_worker() { # NAME NUMBER ARGUMENTS...
    local label=$1 number=$2
    shift 2
    local events="{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"endpoint\": \"tcp://*:$((events_port + number))\"}"
    local where=(env "DYN_SYSTEM_PORT=$((system_port + number))")
    if [ "$device" = gpu ]; then
        local from=$(((number - 1) * gpus))
        where+=("CUDA_VISIBLE_DEVICES=$(seq -s , "$from" $((from + gpus - 1)))")
        set -- --tensor-parallel-size "$gpus" "$@"
    fi
    start "$label" "${where[@]}" "$python" "${vllm[@]}" --model "$MODEL" --served-model-name "$name" \
        --kv-events-config "$events" "$@"
}

wait_for_an_end() {
    wait -n "${started[@]}" || true
    echo "a process ended; its log is in $run" >&2
    exit 1
}
