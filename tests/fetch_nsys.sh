#!/usr/bin/env bash
# Unpacks Debian's Nsight Systems 2022.4 (non-free, 180 MB) into the folder .nsys, without root and without installing
# anything, so that the tests marked nsys have a real one. Where that cannot be done it says why, and they skip.
set -euo pipefail
cd "$(dirname "$0")/.."
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
packages="nsight-systems nsight-systems-target libssh-4 libpfm4"

skip() { echo "no nsys for the tests: $1"; exit 0; }

[ ! -e .nsys/usr/bin/nsys ] || exit 0
command -v nsys >/dev/null && exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || skip "Debian's package is for Linux on x86_64"
command -v apt-get >/dev/null && [ -e $keyring ] || skip "this is no Debian"

apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$apt/lists/partial" "$apt/cache" "$apt/unpacked"
echo "deb [signed-by=$keyring] http://deb.debian.org/debian bookworm main non-free" >"$apt/sources.list"
options=(-qq -o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o "Dir::Etc::sourcelist=$apt/sources.list"
  -o Dir::Etc::sourceparts=- -o Dir::State::status=/dev/null -o Debug::NoLocking=true -o APT::Sandbox::User= -o Acquire::Languages=none)
(cd "$apt" && apt-get "${options[@]}" update && apt-get "${options[@]}" download $packages) ||
  skip "Debian's archive cannot be reached"
for package in "$apt"/*.deb; do
  dpkg-deb -x "$package" "$apt/unpacked"
done
# The importer looks beside itself for libraries that Debian would have installed.
cp -n "$apt"/unpacked/usr/lib/x86_64-linux-gnu/lib*.so.* "$apt/unpacked/usr/lib/nsight-systems/host-linux-x64"
mv "$apt/unpacked" .nsys
