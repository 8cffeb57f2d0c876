#!/bin/bash
# Packs a relocatable bundle: the four programs, stripped, the shared libraries that they need and the machine may lack, the
# template helper. Unpack anywhere and run bin/loded: programs find ../lib by their run path. Everything but the C library comes
# along (so the machine's must not be older than the one of the build: Debian 12 has 2.36); rendering of chat templates needs
# python3 with jinja2 on the machine, requests given as tokens do not.
# Usage: deploy/bundle.sh BUILD_DIR OUT.tar.xz [TEST_PROGRAM...]: test programs of BUILD_DIR/bin come along as well.
# Fails when a library would not be found in the bundle, a program does not start in an empty environment, or the archive is
# larger than 25 MiB.
set -euo pipefail
build=${1:?usage: deploy/bundle.sh BUILD_DIR OUT.tar.xz [TEST_PROGRAM...]}
out=${2:?usage: deploy/bundle.sh BUILD_DIR OUT.tar.xz [TEST_PROGRAM...]}
shift 2
bytes_max=$((25 * 1024 * 1024))
programs=(loded lode lode-gpu-worker lode-cpu-worker)
# Parts of the C library: they belong to the machine's own loader.
libc_parts='^(ld-linux|libc|libm|libdl|librt|libpthread|libresolv|libutil|libanl|libnss_[a-z]+)[.-]'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
stage=$work/lode
mkdir -p "$stage/bin" "$stage/lib" "$stage/libexec/lode"

needed() { ldd "$1" | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}'; }
take() {
  local program=$1
  cp "$build/bin/$program" "$stage/bin/$program"
  strip "$stage/bin/$program"
  needed "$build/bin/$program" | while read -r name path; do
    [[ $name =~ $libc_parts ]] && continue
    [ -e "$stage/lib/$name" ] || { cp -L "$path" "$stage/lib/$name" && strip --strip-unneeded "$stage/lib/$name"; }
  done
}
for program in "${programs[@]}" "$@"; do take "$program"; done
cp "$build/bin/lode-template-helper.py" "$stage/libexec/lode/"

# Every program must find everything in the bundle or in the C library, whatever this machine has besides.
for program in "${programs[@]}"; do
  stray=$(env -i ldd "$stage/bin/$program" | awk '$2 == "=>" {print $1, $3}' | while read -r name path; do
    [[ $name =~ $libc_parts ]] || [[ $path == "$stage/bin/../lib/"* ]] || echo "$name -> $path"
  done)
  [ -z "$stray" ] || { echo "$program would load from outside the bundle:" >&2; echo "$stray" >&2; exit 1; }
done
env -i "$stage/bin/loded" --help >/dev/null || { echo "loded does not start in an empty environment" >&2; exit 1; }
env -i "$stage/bin/lode" --help >/dev/null || { echo "lode does not start in an empty environment" >&2; exit 1; }

tar -C "$work" -c lode | xz -T0 -6 >"$out"
bytes=$(stat -c %s "$out")
echo "$out: $((bytes / 1024)) KiB, $(ls "$stage/lib" | wc -l) libraries, $(du -sk "$stage" | cut -f1) KiB unpacked"
[ "$bytes" -le $bytes_max ] || { echo "larger than $bytes_max bytes" >&2; exit 1; }
