#!/bin/bash
# Runs stages of the experiment on a GPU host that reaches no registry. From the repository's root:
#
#   benchmarks/gpu/run_h200.sh put                  keeps the bundle parts that came along in .carry/*/part-* (once each):
#                                                   a .tar.xz of `site`, with vLLM and what kvtier requires, and of
#                                                   `peers`, with LMCache; later_vllm.sh puts another vLLM into it
#   benchmarks/gpu/run_h200.sh grow [GiB] [GiB]     touches so much of /dev/shm (88 of 100) once, before stages on tmpfs:
#                                                   a virtual machine is given memory as it is touched, which is slow
#   benchmarks/gpu/run_h200.sh STAGE...             prepares what is missing, runs the stages, ends with a table of them
#
#   stage        what                                                             about s   stopped after
#   smoke        the small model, kvtier alone: does it work at all                    45   300
#   doctor       kvtier doctor on both folders                                         15    60
#   ceilings     copies, storage, KvikIO's reads into the GPU                          50   150
#   kernels      gather, scatter, checksum                                             60   120
#   weights      weights from tmpfs by kvtier and others, also in vLLM (WHEELS: folder of the others' wheels; WEIGHTS: models)  370   590
#   weights-disk  weights of 0.6B from the disk, beside direct reads                     20   100
#   weights-engine  an engine's start by phases, of each of FORMATS, and its first prompt from storage    350   590
#   tests        tests/kernels, tests/gpu and tests/io, on the device                  90   240
#   codecs       the codecs' kernels (TUNE: other tilings too)                           90   200
#   equality     blocks and tokens, CUDA graphs on; of each of MODELS                 150   280 each
#   under-load   bursts of saves and loads, and decoding beside them; of each of SYSTEMS     220   580
#   load         32 requests at capacity                                              110   330
#   chaos        bursts, aborts and preemptions while segments are damaged; of MODEL (small, mla); TP=2: two GPUs  130   300
#   demo         what `make demo` runs, with this vLLM                                100   240
#   ttft-tmpfs   kvtier, and the host arena                                          220   590
#   ttft-disk    kvtier from the disk                                                 300   540
#   save         what saving costs, durable rate                                      260   400
#   two-equal    two GPUs: blocks and tokens across TP sizes, and stray contexts      180   330
#   two-ttft     two GPUs: 70B's dimensions at TP=2, in one process                      85   450
#   two-versus   two GPUs: versus-tmpfs with 70B's dimensions at TP=2, H200s                                  460   560
#   two-load     two GPUs: under-load at TP=2, half of 70B's layers, SHM=150G               160 a system   580
#   two-weights  two GPUs: weights of 70B's dimensions, SHM=200G (LAYERS=36 with loaders of shards, 80 without; LOADERS)  480   590
#   two-engines  two GPUs: two engines on one root, SHM=150G REDIS=FOLDER; of each of SYSTEMS (EACH_S of it: 240; WATCH=0: timed)   340   590
#   versus-tmpfs kvtier raw and k4v4, vLLM's tiering, no tier, ceilings, KvikIO alone  340   560
#   versus-lmcache  LMCache in its two ways, from tmpfs                                 270   560
#   versus-disk  k4v4 and vLLM's tiering; LENGTHS=100000 in two calls of 430 and 75     500   560
#   long-doc-qa  20 documents of 20,000 tokens over HTTP, one and two in flight        280   560
#
# ttft-tmpfs, ttft-disk and two-ttft take a codec: ttft-tmpfs@k4v4 has kvtier alone, also from an hbm arena, in
# ttft_tmpfs_k4v4.json. The versus stages write to one file, versus.json, and go on with it while the machine is held:
# run one again for what it left out.
#
# two-engines keeps its records while the machine is held: run it once a system, and the last table has them all.
#
# Several at once on a machine of several GPUs, each lane on its own (CUDA_VISIBLE_DEVICES) and with its own folders, for
# what is not timed, or is timed on its GPU alone:
#
#   benchmarks/gpu/run_h200.sh lanes 0,1:two-equal/two-ttft 2:ttft-disk 3:codecs
#
# Among the stages, NAME=VALUE sets a variable of those below for the stages after it.
#
# Environment: OUT (where JSON and logs go), COUNT (prompts a length), SYSTEMS (of versus and long-doc-qa),
# SAVE_PARTS (of save: ttft,decode,burst), FOLDER (of save), SHM (of /dev/shm), LANES_S (seconds for all lanes), LENGTHS, FOLDERS (of ceilings),
# KINDS (of under-load), HOST_GIB (of under-load: GiB of host memory from which the process that stored a burst loads it), FORMATS (of weights-engine), MODELS (small, mla), PAIRS (windows of decoding), EXTRA (more kvtier settings as JSON), COMMIT (to write down),
# BUNDLE, PARTS, DISK (a folder on the disk), TINY (any text: a tiny model on a CPU, to try this script and all but
# ceilings, kernels, doctor and demo).
# ARENA (size; empty: none), NAME (of the JSON): the host arena in the README's table is ttft-tmpfs with
# LENGTHS=100000 NAME=ttft_arena, on a machine like that of versus-tmpfs. HBM_ARENA: also from an hbm arena of that
# size (with EXTRA='{"codec": "k4v4"}' NAME=ttft_tmpfs_k4v4, say). For versus and long-doc-qa: REPEAT (repetitions),
# TOGETHER (engines that start side by side), DOCUMENTS, WORDS. LIMIT_S: seconds after which a stage is stopped (versus,
# long-doc-qa, weights, under-load, two-load, two-weights, two-engines). EAGER (any text): engines that are timed run
# without compiling and CUDA graphs, which are vLLM's default. LANE: set by lanes.
set -uo pipefail
OUT=${OUT:-/tmp/bench/out}
BUNDLE=${BUNDLE:-/tmp/bundle}
PARTS=${PARTS:-/tmp/bundle_parts}
LANE=${LANE:-}
WORK=/tmp/bench$LANE
TREE=${TREE:-/tmp/kv}
BUILT=$TREE-native
ROOT=$PWD
MEMORY=/dev/shm/kv$LANE
EXTRA=${EXTRA:-{\}}
mkdir -p "$OUT" "$WORK/logs" "$MEMORY"

put() {
  mkdir -p "$PARTS"
  cp .carry/*/part-* "$PARTS/" && ls -l "$PARTS"
}

grow() {
  local jobs="" i
  mount -o remount,size="${2:-100}G" /dev/shm || return 1
  for i in $(seq 8); do
    head -c $((${1:-88} << 27)) /dev/zero > "/dev/shm/grow$i" &
    jobs="$jobs $!"
  done
  wait $jobs
  rm -f /dev/shm/grow?
}

unpack() {
  [ -e "$BUNDLE/.done" ] && return 0
  mkdir -p "$BUNDLE"
  cat "$PARTS"/part-* | xz -dT0 | tar xf - -C "$BUNDLE" || { echo "the bundle in $PARTS is not whole"; return 1; }
  python3 -m compileall -q -j 0 "$BUNDLE/site/vllm" > /dev/null 2>&1
  touch "$BUNDLE/.done"
}

# kvtier, connectors, server and benchmarks as they are when installed, in a tree of links.
link() {
  rm -rf "$TREE" && mkdir -p "$TREE/kvtier"
  ln -s "$ROOT"/kvtier/* "$TREE/kvtier/"
  ln -sfn "$ROOT/connectors" "$ROOT/server" "$TREE/kvtier/"
  ln -s "$ROOT/benchmarks" "$ROOT/tests" "$TREE/"
}

# The library that came along may be of other sources, or want other system libraries: it is built here.
build() {
  local now target=kvtier/io/_native.abi3.so objects=$BUILT/objects source jobs=""
  now=$(cat kvtier/io/native/* | sha256sum)
  [ -e "$target" ] && [ "$(cat "$BUILT/hash" 2> /dev/null)" = "$now" ] && return 0
  rm -rf "$objects" && mkdir -p "$objects"
  for source in kvtier/io/native/*.cpp; do
    g++ -std=c++17 -O3 -fPIC -fvisibility=hidden -pthread -c "$source" -o "$objects/$(basename "$source").o" &
    jobs="$jobs $!"
  done
  for job in $jobs; do wait "$job" || return 1; done
  g++ -shared -pthread -static-libstdc++ -static-libgcc "$objects"/*.o -ldl -o "$target.new" || return 1
  mv "$target.new" "$target" && echo "$now" > "$BUILT/hash"
}

# The writable disk with the most room that is no memory.
disk_folder() {
  df --output=avail,target -x tmpfs -x devtmpfs -x squashfs -x ramfs 2> /dev/null | tail -n +2 | sort -rn |
    while read -r _ place; do
      folder=${place%/}/kvtier-bench
      mkdir -p "$folder" 2> /dev/null && touch "$folder/try" 2> /dev/null && { echo "$folder"; break; }
    done
}

prepare() {
  [ -n "$LANE" ] || { unpack && link && build; } || return 1
  [ -n "${TINY:-}" ] || mount -o remount,size=${SHM:-100G} /dev/shm 2> /dev/null || echo "/dev/shm keeps its size"
  DISK=${DISK:-$(disk_folder)}
  export DISK PYTHONPATH=$TREE:$BUNDLE/site PYTHONSAFEPATH=1 BUNDLE_PEERS=$BUNDLE/peers
  export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONHASHSEED=0 PYTHONUNBUFFERED=1
  export VLLM_CACHE_ROOT=$WORK/vllm
  DISK=$DISK$LANE
  mkdir -p "$DISK"
  df -h /dev/shm "$DISK" | sed 's/^/  /'
  python3 -c "import kvtier.connectors.bridge, kvtier.io.native as n, torch; print('  kvtier imports;', n.instruction_set(), torch.__version__, torch.cuda.device_count(), 'GPUs')"
}

bench() {
  local module=$1 seconds=$2
  shift 2
  timeout -k 10 "$seconds" python3 -m "benchmarks.gpu.$module" ${TINY:+--tiny} "$@"
}

ttft() {
  local name=$1 folder=$2 seconds=$3
  shift 3
  bench ttft "$seconds" --folder "$folder" --out "$OUT/$name.json" --logs "$WORK/logs" --extra "$EXTRA" \
    ${LENGTHS:+--lengths "$LENGTHS"} ${EAGER:+--eager} "$@"
}

versus() {
  local place=$1 folder=$2 systems=$3 limit=${LIMIT_S:-480}
  shift 3
  [ -z "${TINY:-}" ] || systems=none,kvtier,kvtier-k4v4 # the others want a GPU
  timeout -k 10 $((limit + 80)) python3 -m benchmarks.versus ${TINY:+--tiny} --place "$place" --folder "$folder" \
    --systems "${SYSTEMS:-$systems}" --out "$WORK/versus.json" --logs "$WORK/logs" --seconds "$limit" --extra "$EXTRA" \
    --repetitions "${REPEAT:-3}" --together "${TOGETHER:-3}" ${LENGTHS:+--lengths "$LENGTHS"} ${EAGER:+--eager} "$@"
  local code=$?
  cp "$WORK/versus.json" "$OUT/"
  return $code
}

# The engine's own KV cache holds three of the documents (8 GiB of the 8B model's KV), of about 20,000 tokens each. Of "hi"
# over and over, dummy weights make KV that is too small for a codec's scales, and all of it is refused.
long_doc_qa() {
  local model=$WORK/models/8b-text limit=${LIMIT_S:-500} systems=prefix,native,kvtier-k4v4
  local vllm="--load-format dummy --dtype bfloat16 --max-model-len 24576 --kv-cache-memory-bytes 8589934592 --max-num-seqs 8"
  local tier="{\"root\": \"$MEMORY\", \"capacity_bytes\": \"105GiB\", \"model_tag\": \"llama-8b-dummy\"}"
  local forwards="--compilation-config '{\"cudagraph_capture_sizes\": [1, 2, 4, 8, 16, 32, 64, 128, 256]}'"
  [ -z "${EAGER:-}${TINY:-}" ] || forwards=--enforce-eager
  local asked="--text python --num-documents ${DOCUMENTS:-20} --document-length ${WORDS:-13500} --repeat-count 1 --repeat-mode tile"
  if [ -n "${TINY:-}" ]; then
    model=$WORK/models/tiny-text systems=prefix,kvtier
    vllm="--load-format dummy --dtype float32 --block-size 32 --max-model-len 1024 --num-gpu-blocks-override 48 --max-num-seqs 4"
    tier="{\"root\": \"$MEMORY\", \"capacity_bytes\": \"1GiB\", \"model_tag\": \"tiny\", \"chunk_tokens\": 64, \
      \"min_load_tokens\": 64, \"segment_bytes\": \"16MiB\", \"host\": {\"arena_bytes\": \"64MiB\"}}"
    asked="--num-documents 6 --document-length 300 --repeat-count 1 --repeat-mode tile"
  fi
  python3 -m benchmarks.demo.model "$model" ${TINY:+tiny} || return 1
  timeout -k 30 "$limit" python3 -m benchmarks.serving long_doc_qa --systems "${SYSTEMS:-$systems}" --model "$model" \
    --work "$WORK/serving" --out "$OUT/${NAME:-long_doc_qa}.json" --tier "$tier" --start-timeout 150 \
    --native '{"cpu_bytes_to_use": 17179869184}' --vllm "$forwards --gpu-memory-utilization 0.5 $vllm" \
    -- $asked --output-len 8 --ignore-eos --floor 2 --max-inflight-requests 1 \
    -- $asked --output-len 8 --ignore-eos --floor 2 --max-inflight-requests 2 --first-document 100
  local code=$?
  cp "$WORK"/serving/server-*.log "$WORK/logs/"
  rm -rf "$MEMORY/benchmark-tier"
  return $code
}

with_codec() {
  python3 -c 'import json, sys; print(json.dumps(json.loads(sys.argv[1]) | {"codec": sys.argv[2]}))' "$EXTRA" "$1"
}

stage() {
  case $1 in
    two-ttft@*)
      (
        codec=${1#*@}
        EXTRA=$(with_codec "$codec") NAME="two_gpus_ttft_$codec"
        stage two-ttft
      ) ;;
    versus-tmpfs)
      versus tmpfs "$MEMORY" none,kvtier,kvtier-k4v4,native ;;
    versus-lmcache)
      versus tmpfs "$MEMORY" lmcache,lmcache-mp --no-alone ;;
    versus-disk)
      versus disk "$DISK" none,kvtier-k4v4,native ;;
    long-doc-qa)
      long_doc_qa ;;
    ttft-*@*)
      local stage=${1%@*} codec=${1#*@} arena=""
      [ "$stage" = ttft-disk ] || [ -n "${TINY:-}" ] || arena=${HBM_ARENA:-4GiB}
      (
        EXTRA=$(with_codec "$codec") NAME="${stage/-/_}_$codec" ARENA="" HBM_ARENA=$arena
        stage "$stage"
      ) ;;
    smoke)
      [ -n "${TINY:-}" ] || LENGTHS=${LENGTHS:-2048,8192}
      ttft smoke "$MEMORY" 300 --model small --count 2 --timeout 140 ;;
    doctor)
      for folder in "$MEMORY" "$DISK"; do timeout -k 5 30 python3 -m kvtier.cli doctor "$folder"; done ;;
    ceilings)
      TINY="" bench ceilings 150 --folders "${FOLDERS:-$MEMORY,$DISK}" --out "$OUT/ceilings.json" \
        --bytes 1073741824,8589934592 ;;
    kernels)
      TINY="" bench kernels 120 --out "$OUT/kernels.json" ;;
    weights)
      bench weights_rate "${LIMIT_S:-590}" --out "$OUT/weights_rate.json" --folder "$MEMORY/weights" ${WHEELS:+--wheels "$WHEELS"} \
        ${WEIGHTS:+--models "$WEIGHTS"} --repetitions "${REPEAT:-3}" ;;
    weights-disk)
      rm -rf "$DISK/weights"
      python3 -c "from pathlib import Path; from benchmarks.gpu.weights_files import MODELS, make; make(Path('$DISK/weights'), MODELS['0.6b'])" &&
        python3 -m kvtier.cli weights verify "$DISK/weights" --write && sync && echo 1 > /proc/sys/vm/drop_caches &&
        timeout -k 5 100 python3 -m kvtier.cli weights bench "$DISK/weights" --device cuda:0
      rm -rf "$DISK/weights" ;;
    weights-engine)
      bench weights_engine 590 --out "$OUT/weights_engine.json" --folder "$MEMORY/start" --logs "$WORK/logs" \
        --formats "${FORMATS:-auto,kvtier}" --repetitions "${REPEAT:-2}" ${WHEELS:+--wheels "$WHEELS"} ;;
    tests)
      (cd "$TREE" && timeout -k 10 240 python3 -m pytest -q -p no:cacheprovider -n 4 --dist loadfile --rootdir "$TREE" \
        tests/kernels tests/gpu tests/io) ;;
    codecs)
      TINY="" bench codec_kernels 200 --out "$OUT/codec_kernels.json" ${TUNE:+--tune} ;;
    equality)
      local model bad=0
      for model in ${MODELS:-small mla}; do
        bench equality 280 --model "$model" --folder "$MEMORY" --out "$OUT/equality_$model.json" --logs "$WORK/logs" \
          --timeout 120 || bad=1
      done
      return $bad ;;
    under-load)
      bench under_load "${LIMIT_S:-580}" --folder "${FOLDER:-$MEMORY}" --out "$OUT/${NAME:-under_load}.json" --logs "$WORK/logs" \
        --extra "$EXTRA" --systems "${SYSTEMS:-kvtier,native}" --kinds "${KINDS:-save,long,short}" ${HOST_GIB:+--host-gib "$HOST_GIB"} \
        ${EAGER:+--eager} "${@:2}" ;;
    load)
      bench load_mix 330 --folder "$MEMORY" --out "$OUT/load_mix.json" --logs "$WORK/logs" ;;
    chaos)
      bench chaos 300 --model "${MODEL:-small}" --folder "$MEMORY" --out "$OUT/${NAME:-chaos}.json" --logs "$WORK/logs" \
        --tp "${TP:-1}" ;;
    demo)
      (cd "$TREE" && timeout -k 10 240 python3 -m benchmarks.demo --output "$DISK/demo" --result "$OUT/demo.json") ;;
    ttft-tmpfs)
      ttft "${NAME:-ttft_tmpfs}" "$MEMORY" 590 --count "${COUNT:-3}" \
        --arena "${ARENA-16GiB}" --hbm-arena "${HBM_ARENA:-}" --timeout 170 ;;
    ttft-disk)
      ttft "${NAME:-ttft_disk}" "$DISK" 540 --count "${COUNT:-2}" --timeout 170 ;;
    save)
      bench save_cost 400 --folder "${FOLDER:-$DISK}" --parts "${SAVE_PARTS:-ttft,decode,burst}" --out "$OUT/save_cost.json" --logs "$WORK/logs" --extra "$EXTRA" \
        --pairs "${COUNT:-3}" --decode-pairs "${PAIRS:-5}" ;;
    two-equal)
      bench equality 330 --across-tp --folder "$MEMORY" --out "$OUT/two_gpus_equal.json" --logs "$WORK/logs" ;;
    two-ttft)
      local lengths=32768,100000
      [ -z "${TINY:-}" ] || lengths=300,600
      ttft "${NAME:-two_gpus_ttft}" "$MEMORY" 450 --model 70b --tp 2 --gpu-memory 0.85 --timeout 280 \
        --lengths "${LENGTHS:-$lengths}" --count "${COUNT:-2}" ;;
    two-versus)
      LENGTHS=${LENGTHS:-32768,100000} REPEAT=${REPEAT:-2} TOGETHER=1 \
        versus tmpfs "$MEMORY" none,kvtier,kvtier-k4v4,native --model 70b --tp 2 --kv-gib 18 --bare 1 --no-alone \
        --start-seconds 240 ;;
    two-load)
      NAME=two_gpus_under_load KINDS=${KINDS:-save,long} SYSTEMS=${SYSTEMS:-kvtier} \
        stage under-load --model 70b-half --tp 2 --gpu-memory 0.85 --timeout 400 ;;
    two-weights)
      bench weights_rate "${LIMIT_S:-590}" --ranks 2 --folder "$MEMORY/weights" --out "$OUT/${NAME:-two_gpus_weights}.json" \
        --logs "$WORK/logs/two-ranks" --layers "${LAYERS:-36}" --repetitions "${REPEAT:-3}" \
        ${LOADERS:+--loaders "$LOADERS"} ${WHEELS:+--wheels "$WHEELS"} ;;
    two-engines)
      bench two_engines "${LIMIT_S:-590}" --folder "$MEMORY" --out "$OUT/two_gpus_engines.json" --logs "$WORK/logs" --models "$WORK/models" \
        --records "$WORK/two-engines" --systems "${SYSTEMS:-kvtier}" --seconds "${EACH_S:-240}" --watch "${WATCH:-16}" --extra "$EXTRA" \
        ${REDIS:+--redis "$REDIS"} ${EAGER:+--eager} ;;
    *)
      echo "no stage $1"
      return 2 ;;
  esac
}

main() {
  local name started code failed=0 summary=""
  prepare || { echo "PREPARING FAILED"; exit 1; }
  for name in "$@"; do
    case $name in *=*) export "${name?}"; continue ;; esac
    echo "== $name"
    started=$SECONDS
    stage "$name" 2>&1 | tee "$WORK/logs/stage-$name.log"
    code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || failed=1
    summary="$summary$(printf '%-12s exit %-4s %4d s' "$name" "$code" $((SECONDS - started)))"$'\n'
    tar czf "$OUT/logs.tar.gz" -C "$WORK" --exclude='*.job' --exclude='*.result' logs
  done
  echo "== GPU memory in use now: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader 2> /dev/null | tr '\n' ' ')"
  printf '%s' "$summary"
  exit $failed
}

# Each argument GPUS:STAGE/STAGE... is a lane. What they wrote comes together as one archive: few files come back.
# After LANES_S seconds those that still run are ended, so that the others' results are not lost.
lanes() {
  local lane number=0 jobs="" job failed=0 guard
  prepare || { echo "PREPARING FAILED"; exit 1; }
  for lane in "$@"; do
    number=$((number + 1))
    mkdir -p "$OUT/lane$number"
    CUDA_VISIBLE_DEVICES=${lane%%:*} LANE=-lane$number OUT=$OUT/lane$number \
      setsid bash "$0" $(echo "${lane#*:}" | tr '/' ' ') > "$OUT/lane$number/output.log" 2>&1 &
    jobs="$jobs $!"
  done
  (sleep "${LANES_S:-550}"; for job in $jobs; do kill -- "-$job"; done) 2> /dev/null &
  guard=$!
  for job in $jobs; do wait "$job" || failed=1; done
  kill $guard 2> /dev/null
  for lane in $(seq $number); do
    echo "=== lane $lane"
    tail -n "${TAIL:-40}" "$OUT/lane$lane/output.log"
  done
  (cd "$OUT" && tar czf lanes.tar.gz lane* && rm -rf lane?)
  exit $failed
}

case ${1:-} in
  "") sed -n '2,/^set /p' "$0" | grep '^#'; exit 2 ;;
  lanes) shift; lanes "$@" ;;
  put) put; shift; [ $# = 0 ] || main "$@" ;;
  grow) shift; grow "$@" ;;
  *) main "$@" ;;
esac
