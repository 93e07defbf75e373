#!/usr/bin/env bash
# Records or takes a capture, compares it with a baseline, and says where GitHub shows it what came of it.
# action.yml sets the variables. Runs by hand, too: CAPTURE=after.sqlite BASELINE=before.sqlite bash check.sh
set -euo pipefail

out=${OUTPUT:-nsys-analyze-out}
baselines=${BASELINES:-.nsys-analyze/baselines}
baseline=${BASELINE:-main}
mkdir -p "$out"

# Ends with a result for later steps of the job, and a line for people: of the level notice, warning or error.
finish() { # RESULT STATUS LEVEL LINE
  echo "result=$1" >> "${GITHUB_OUTPUT:-/dev/null}"
  echo "::$3 title=nsys-analyze $1::${4//%/%25}"
  exit "$2"
}

if [ -n "${PROGRAM:-}" ]; then
  eval "words=($PROGRAM)" # as a shell reads a command line
  # shellcheck disable=SC2086 # options are several words
  nsys-analyze run ${RUN_OPTIONS:-} --output-dir "$out/run" --rerun -- "${words[@]}" ||
    finish failed 1 error "The program failed, or left nothing to compare: see $out/run"
  CAPTURE=$out/run
fi
nsys-analyze report "${CAPTURE:?give a capture or a program}" --format json -o "$out/report.json" ||
  finish failed 1 error "$CAPTURE cannot be read"

if [ "${SAVE:-false}" = true ]; then
  nsys-analyze baseline save "$baseline" "$out/report.json" --folder "$baselines" ||
    finish failed 1 error "$CAPTURE is no baseline"
  finish saved 0 notice "The baseline $baseline is kept in $baselines"
fi

before=$baseline
[ -e "$before" ] || before=$baselines/$baseline
limits=(--fail-above "${FAIL_ABOVE:-5%}")
[ -z "${BUDGETS:-}" ] || limits+=(--budgets "$BUDGETS")
if [ ! -e "$before" ]; then
  [ -n "${BUDGETS:-}" ] || finish no-baseline 0 notice "There is no baseline $baseline in $baselines"
  before=$out/report.json # budgets need none
fi

status=0
# shellcheck disable=SC2086
nsys-analyze compare "$before" "$out/report.json" "${limits[@]}" ${COMPARE_OPTIONS:-} --format markdown \
  > "$out/comparison.md" 2> "$out/messages.txt" || status=$?
cat "$out/comparison.md" "$out/messages.txt" | tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
# What decided, else the answer of the first comparison.
line=$(grep -h -m 1 -E '^(\*\*Slower|Budgets (exceeded|not known)|Error)' "$out/comparison.md" "$out/messages.txt" ||
  grep -m 1 '^\*\*' "$out/comparison.md" || echo "See $out/comparison.md")
line=${line//\*\*/} line=${line//$'\n'/; }
case $status in
  0) finish passed 0 notice "$line" ;;
  3) finish slower 3 error "$line" ;;
  4) finish other-conditions 0 warning "$line" ;;
  *) finish failed "$status" error "$line" ;;
esac
