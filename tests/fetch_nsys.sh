#!/usr/bin/env bash
# Unpacks Debian's Nsight Systems (non-free, 180 MB; 2022.4 in bookworm) into the folder .nsys, without root and without
# installing anything, so that the tests marked nsys have a real one. It comes from where this machine's own apt gets
# Debian: its sources, mirrors, proxies, keys and passwords. Where that cannot be done it says why, and they skip.
set -euo pipefail
cd "$(dirname "$0")/.."
packages="nsight-systems nsight-systems-target libssh-4 libpfm4"

skip() { echo "no nsys for the tests: $1"; exit 0; }

[ ! -e .nsys/usr/bin/nsys ] || exit 0
command -v nsys >/dev/null && exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || skip "Debian's package is for Linux on x86_64"
command -v apt-get >/dev/null || skip "this machine has no apt"
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-sid}")

apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/sources" "$apt/unpacked"
eval "$(apt-config shell list Dir::Etc::sourcelist/f parts Dir::Etc::sourceparts/d)"
"${PYTHON:-python3}" tests/apt_sources.py "$list" "$parts" "$codename" "$apt/sources" ||
  skip "no apt source of this machine is Debian's archive ($list, $parts)"
options=(-qq -o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o Dir::State::status=/dev/null
  -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$apt/sources"
  -o Debug::NoLocking=true -o APT::Sandbox::User= -o Acquire::Languages=none)
(cd "$apt" && apt-get "${options[@]}" update && apt-get "${options[@]}" download $packages) ||
  skip "the Debian sources of this machine do not give it; apt-get says why above"
for package in "$apt"/*.deb; do
  dpkg-deb -x "$package" "$apt/unpacked"
done
# The importer looks beside itself for libraries that Debian would have installed.
cp -n "$apt"/unpacked/usr/lib/x86_64-linux-gnu/lib*.so.* "$apt/unpacked/usr/lib/nsight-systems/host-linux-x64"
mv "$apt/unpacked" .nsys
