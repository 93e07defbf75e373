#!/usr/bin/env bash
# Makes examples/sweep anew on a machine with a GPU and nsys: timings, what its captures say, and a few of them to open.
# Half an hour on an H200; interrupted, it goes on where it stopped.
#
#   examples/generate.sh [WORK_FOLDER]
set -euo pipefail
examples=$(cd "$(dirname "$0")" && pwd)
work=${1:-$examples/../runs}
sizes=small,medium,large,xl,2.7B

run() { (cd "$work" && nsys-analyze run --output-dir sweep --resume --steps 5 "$@"); }

mkdir -p "$work"
run --model $sizes --context-length 128,256,512,1024
run --model $sizes --context-length 512 --precision bf16
run --model $sizes --context-length 512 --compile
run --model $sizes --context-length 512 --mode forward
run --model 10B --context-length 128 # 12.8 billion parameters with gradients and AdamW's state need 205 GB

rm -rf "$examples/sweep"
mkdir -p "$examples/sweep"
cp "$work/sweep/timings.csv" "$examples/sweep"
python "$examples/captures.py" "$work/sweep" >"$examples/sweep/captures.csv"
for name in small_ctx256_train_fp32 small_ctx512_train_bf16 small_ctx512_train_fp32_compile small_ctx512_forward_fp32; do
  mkdir "$examples/sweep/$name"
  cp "$work/sweep/$name/manifest.json" "$examples/sweep/$name"
  nsys-analyze share "$work/sweep/$name/capture.sqlite" -o "$examples/sweep/$name/capture.sqlite"
done
# The run that README.md shows, with its own timings; `make examples` writes its report and the sweep's.
shown=small_ctx256_train_fp32
(cd "$examples/sweep" && sed -n "1p;/^$shown,/p" timings.csv >"$shown/timings.csv")
