#!/usr/bin/env bash
# Installs Debian's Chromium for the tests of the page, where this is root on Debian or Ubuntu and none is there. Where
# it cannot be installed it says why, and those tests skip.
set -euo pipefail
for name in chromium chromium-browser google-chrome google-chrome-stable; do
  command -v "$name" >/dev/null && exit 0
done
skip() { echo "no Chromium for the tests: $1"; exit 0; }
command -v apt-get >/dev/null || skip "this machine has no apt"
[ "$(id -u)" = 0 ] || skip "installing it needs root: apt-get install chromium"
(apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends -y chromium) ||
  skip "apt-get says why above"
