#!/usr/bin/env bash
# Makes examples/benches anew on a machine with a GPU and nsys: the rows of every bench, and their report.
# Twenty minutes on an H200; interrupted, it goes on where it stopped.
#
#   examples/benches.sh [WORK_FOLDER]
set -euo pipefail
examples=$(cd "$(dirname "$0")" && pwd)
work=${1:-$examples/../runs}

run() {
  name=$1
  shift
  (cd "$work" && nsys-analyze bench "$name" --output-dir "benches/$name" --resume "$@")
}

mkdir -p "$work"
run timing --context-length 128,256,512 --steps 5 --warmup-steps 2
run precision
run memory --context-length 256,512
run attention
run variants
run variants --context-length 1024 --d-head 64
run variants --batch-size 4 --num-heads 32 --context-length 128 --d-head 128 --precision bf16
run variants --batch-size 64 --num-heads 32 --context-length 4096 --d-head 128 --precision bf16 \
  --implementation naive,blocked,fused,flash,sdpa # tiled: seconds a call
run flash --precision bf16 --measured-ms 20
run flash --precision fp32 --implementation flash,unfused,sdpa --d-head 64,128 --measured-ms 20 \
  --context-length 128,256,512,1024,2048,4096,8192,16384
run compile --model small --mode train
run decode --model small
run attainable

rm -rf "$examples/benches"
for folder in "$work"/benches/*/; do
  name=$(basename "$folder")
  kept=$examples/benches/$name
  mkdir -p "$kept"
  cp "$folder/bench.jsonl" "$kept"
  for capture in "$folder"/captures/*/; do
    if [ -d "$capture" ]; then
      place=$kept/captures/$(basename "$capture")
      mkdir -p "$place"
      cp "$capture/manifest.json" "$place"
      nsys-analyze share "$capture/capture.sqlite" -o "$place/capture.sqlite"
    fi
  done
done
cd "$examples/benches" && nsys-analyze report . -o report.md
