#!/bin/sh
# Prints the path of each Python on the PATH that can set up an environment, the newest first, one of
# each version. Each candidate is run, as a name alone proves nothing: pyenv, for example, puts a
# python3.13 on the PATH that fails unless that version is active.
IFS=:
for folder in $PATH; do
  for python in "$folder"/python3.[1-9][0-9] "$folder"/python3 "$folder"/python; do
    [ -x "$python" ] || continue
    "$python" -c '
import sys
import ensurepip, venv  # some systems package them apart
if sys.version_info >= (3, 11):
    print(sys.version_info[1], sys.executable)
' 2>/dev/null
  done
done | sort -s -r -n -u -k 1,1 | cut -d " " -f 2-
