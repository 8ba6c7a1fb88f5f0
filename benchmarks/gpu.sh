#!/usr/bin/env bash
# Every check and benchmark that wants a GPU, in under nine minutes.
#
#   bash benchmarks/gpu.sh [PACKED_IMAGES]
#
# Runs from a bare copy of the tree with nothing installed; packages that are missing on the machine can lie in wheels/. Each
# step writes its JSON (the tests tests_gpu.log) into $OUT, by default results/, as soon as it knows something. A step
# that fails or runs out of time does not stop the others; the end says which, and the exit code is then 1. PACKED_IMAGES,
# by default packed/train, is a folder of shards that `finola pack` wrote: training throughput is measured on it.
# DEVICE=cpu rehearses every step as small as it gets, into runs/rehearsal. PYTHON names another python3.
set -uo pipefail
source "$(dirname "$0")/gpu_setup.sh"
packed=${1:-packed/train}
bench="--batch 32 --channels 1024 3072 --size 8 16" throughput="--seconds 30 --batch-size 256"
pretraining="--batch-size 64 --rounds 2" detection=""
out=${OUT:-results}
if [ "$device" = cpu ]; then
    out=${OUT:-runs/rehearsal}
    bench="--batch 2 --channels 64 --size 8" throughput="--seconds 3 --batch-size 8"
    pretraining="--batch-size 2 --rounds 1 --models masked_finola_b_mfw720 mae_vit_tiny"
    detection="--models detr_mf_dec_211_mfw720 --size 128 192 --repeats 2"
fi
mkdir -p "$out"
summary=() failed=0

step() {  # NAME SECONDS COMMAND ...
    local name=$1 limit=$2 start=$SECONDS state=done code
    shift 2
    echo "== $name: $*"
    timeout -k 5 "$limit" "$@"
    code=$?
    if [ $code = 124 ] || [ $code = 137 ]; then state="OUT OF TIME"; elif [ $code != 0 ]; then state="FAILED ($code)"; fi
    [ $code = 0 ] || failed=1
    summary+=("$name: $state, $((SECONDS - start)) s")
}
tests() {  # the files with tests for a GPU alone: others may need packages that are missing
    grep -rlE --include='*.py' 'pytest\.mark\.gpu' tests |
        xargs "$python" -m pytest -m gpu -p no:cacheprovider --continue-on-collection-errors 2>&1 | tee "$out/tests_gpu.log"
}
bench() { "$python" -m finola.cli bench operator --fast-only --json "$@" > "$out/bench_gpu.json"; }
export -f tests bench
export python out

# the limits come to 540 s
step "GPU tests" 130 bash -o pipefail -c tests
step "operator bars" 80 "$python" benchmarks/operator_bars.py --device "$device" --out "$out/operator_gpu.json"
step "a kernel a step" 40 "$python" benchmarks/fused_step.py --device "$device" --out "$out/fused_step_gpu.json"
step "operator, small" 40 bash -c "bench --device $device $bench"
if [ -d "$packed" ]; then
    size=$("$python" -c "import json, sys; print(json.load(open(sys.argv[1]))['encoding']['size'])" "$packed/index.json")
    step "throughput" 60 "$python" benchmarks/throughput.py --data "$packed" --device "$device" --resident-size "$size" \
        $throughput --out "$out/throughput_gpu.json"
else
    summary+=("throughput: skipped, no folder $packed")
fi
step "pre-training" 80 "$python" benchmarks/pretraining.py --device "$device" $pretraining --out "$out/pretraining_gpu.json"
step "detectors" 110 "$python" benchmarks/detection.py --device "$device" $detection --out "$out/detection_gpu.json"
echo "== in $out after $SECONDS s"
printf '%s\n' "${summary[@]}"
exit $failed
