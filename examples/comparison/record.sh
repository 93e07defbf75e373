#!/bin/bash
# record.sh KIND FOLDER: captures of one kind of program.py, each in a process of its own, first timed without a profiler.
# 10 of the program as it is and 2 of each with 2, 5 and 10 % planted, in a mixed order. NSYS and PYTHON name the commands.
set -u
kind=$1 folder=$2 here=$(cd "$(dirname "$0")" && pwd) nsys=${NSYS:-nsys} python=${PYTHON:-python3}
program=("$python" "$here/program.py" --kind "$kind")
mkdir -p "$folder"
base=$("${program[@]}" | "$python" -c 'import json, sys; print(json.load(sys.stdin)["median_ms"])')
for run in 0:0 1:0 0:0.02 2:0 0:0.05 3:0 0:0.10 4:0 5:0 1:0.02 6:0 1:0.05 7:0 1:0.10 8:0 9:0; do
  name=${kind}_p${run#*:}_${run%:*}
  planted=(--planted "${run#*:}" --base-ms "$base")
  "${program[@]}" "${planted[@]}" | sed "s/^{/{\"name\": \"$name\", /" >> "$folder/$kind.jsonl"
  "$nsys" profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --capture-range=cudaProfilerApi \
    --capture-range-end=stop --force-overwrite=true --output="$folder/$name" \
    "${program[@]}" "${planted[@]}" --profiled > /dev/null
  "$nsys" export --type sqlite --force-overwrite=true --output "$folder/$name.sqlite" "$folder/$name.nsys-rep"
  rm "$folder/$name.nsys-rep"
done
