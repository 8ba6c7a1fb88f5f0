#!/usr/bin/env bash
# Pre-train without labels, probe, fine-tune, score, predict: the whole chain, in minutes on a CPU.
#
#   bash examples/pretrain_and_classify.sh IMAGENETTE/train IMAGENETTE/val RUNS PHOTO...
#
# 64-px images and one or two epochs: enough to see every command work, far too few to learn much. Without the words in
# `small`, `block` and the epochs these are the recipes of docs/pretraining.md.
set -euo pipefail
train=$1 val=$2 runs=$3
shift 3
data=(--data "$train" --val "$val")
small=(--data.image_size 64 --data.resident true --data.resident_size 96 --optim.batch_size 64 --optim.warmup_epochs 0.2)
block=(--model.block_size 2 --model.decoder_depth 1)

finola train imagenette/masked_b_w720 "${data[@]}" --out "$runs/masked_b" "${small[@]}" "${block[@]}" --optim.epochs 2
finola probe imagenette/lin_w720 --weights "$runs/masked_b/weights.safetensors" "${data[@]}" --out "$runs/lin" \
    "${small[@]}" --data.augment false --optim.epochs 10
finola probe imagenette/tran1_w720 --weights "$runs/masked_b/weights.safetensors" "${data[@]}" --out "$runs/tran1" \
    "${small[@]}" --data.augment false --data.policy null --optim.epochs 5
finola finetune imagenette/tran1_ft_w720 --weights "$runs/tran1/weights.safetensors" "${data[@]}" \
    --out "$runs/tran1_ft" "${small[@]}" --optim.epochs 2 --optim.base_lr 2e-3
finola eval "$runs/tran1_ft/weights.safetensors" --data "$val" --panel "$runs/confusion.png"
finola predict "$@" --weights "$runs/tran1_ft/weights.safetensors" --out "$runs/predictions"
