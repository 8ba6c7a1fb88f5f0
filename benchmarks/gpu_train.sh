#!/usr/bin/env bash
# Train the shipped model further on a GPU that is rented for minutes.
#
#   bash benchmarks/gpu_train.sh start MINUTES    in the background, done within MINUTES: measures the rate, then trains for
#                                                 as many epochs as fit, from the shipped weights
#   bash benchmarks/gpu_train.sh wait SECONDS     until it is done, SECONDS at most; then its files are in $OUT. Exits with
#                                                 3 where it still runs
#   bash benchmarks/gpu_train.sh join FOLDER      elsewhere, on these files: weights.safetensors of its pieces, checked
#
# Runs from a bare copy of the tree. packed/train and packed/val hold the images (`finola pack`). What comes back: fp16
# weights in pieces below 16 MiB, result.json, the sums of these in sha256, and train.log. In the meantime all is in
# runs/gpu_train. DEVICE=cpu rehearses it; BATCH_SIZE (256) and BASE_LR (1.5e-3) can be changed.
set -euo pipefail
run=runs/gpu_train
packed=packed

start() {  # MINUTES
    if [ -e $run ]; then echo "$run: is there already; remove it to start again" >&2; exit 2; fi
    mkdir -p $run
    cp -r $packed $run/data  # the machine's tools may exchange the carried folder while training reads it
    setsid nohup bash "$0" work "$1" > $run/train.log 2>&1 < /dev/null &
    echo "started, at most $1 minutes; bash $0 wait SECONDS"
}

work() {  # MINUTES
    local code=0
    timeout -k 20 "$1m" "$python" benchmarks/gpu_train.py --data $run/data --out $run --minutes "$1" \
        --device "$device" --batch-size "${BATCH_SIZE:-256}" --base-lr "${BASE_LR:-1.5e-3}" || code=$?
    if [ $code = 0 ]; then pieces || code=$?; fi
    echo $code > $run/ended
}

pieces() (
    mkdir $run/pieces && cd $run/pieces && cp ../run/result.json . && mv ../weights.safetensors . &&
        split -b 15M -d -a 2 weights.safetensors weights.safetensors. &&
        sha256sum result.json weights.safetensors* > sha256 && rm weights.safetensors
)

wait_for() {  # SECONDS
    local end=$((SECONDS + $1)) out=${OUT:-runs/gpu_train_out}
    while [ ! -e $run/ended ] && [ $SECONDS -lt $end ]; do sleep 2; done
    mkdir -p "$out"
    cp $run/train.log "$out"
    tail -n 5 $run/train.log
    if [ ! -e $run/ended ]; then echo "still running"; exit 3; fi
    [ ! -d $run/pieces ] || cp $run/pieces/* "$out"
    echo "ended with $(cat $run/ended); files in $out: $(ls "$out" | tr '\n' ' ')"
    exit "$(cat $run/ended)"
}

join() {  # FOLDER
    cd "$1"
    cat weights.safetensors.?? > weights.safetensors
    sha256sum -c sha256
}

case "${1:-} $#" in
    "start 2" | "work 2") source "$(dirname "$0")/gpu_setup.sh"; "$@" ;;
    "wait 2") cd "$(dirname "$0")/.."; wait_for "$2" ;;
    "join 2") join "$2" ;;
    *) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
