#!/usr/bin/env bash
# Every check and benchmark that wants a GPU, in under nine minutes; writes results/*_gpu.json (or into $OUT).
#
#   bash benchmarks/gpu.sh [PACKED_IMAGES]
#
# PACKED_IMAGES is a folder of shards that `finola pack --size 160` wrote; with it the training throughput of the shipped
# recipe is measured too. The packages of the train, ssl, detection and dev extras must be importable.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.
out=${OUT:-results}
failed=0
step() { echo "== $*"; "$@" || { echo "== FAILED: $*"; failed=1; }; }

step timeout 100 python3 -m pytest -m gpu tests/e2e/test_gpu.py tests/data/test_loader.py
step timeout 70 python3 benchmarks/pretraining.py --device cuda --batch-size 64 --rounds 2 \
    --out "$out/pretraining_gpu.json"
step timeout 130 python3 benchmarks/operator_bars.py --device cuda --out "$out/operator_gpu.json"
step timeout 100 python3 benchmarks/detection.py --device cuda --out "$out/detection_gpu.json"
step timeout 50 python3 -m finola.cli bench operator --device cuda --batch 32 --channels 1024 3072 --size 8 16 --fast-only
if [ $# -gt 0 ]; then
    step timeout 80 python3 benchmarks/throughput.py --data "$1" --device cuda --seconds 30 \
        --out "$out/throughput_gpu.json"
fi
exit $failed
