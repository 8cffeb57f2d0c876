#!/bin/sh
# Copies a program and the shared libraries it needs (all but the C library's own) into a folder that runs on any x86-64 Linux with
# a C library no older than this one's: bundle.sh PROGRAM FOLDER, then FOLDER/run ARGUMENTS there.
set -eu
program=$1 folder=$2
mkdir -p "$folder/lib"
strip -o "$folder/program" "$program"
ldd "$program" | awk '$3 ~ /^\// {print $3}' | while read -r library; do
  case $(basename "$library") in
    libc.so.* | libm.so.* | libpthread.so.* | libdl.so.* | librt.so.*) ;;
    *) strip -o "$folder/lib/$(basename "$library")" "$library" ;;
  esac
done
cat > "$folder/run" <<'RUN'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH="$here/lib" exec "$here/program" "$@"
RUN
chmod 755 "$folder/run"
