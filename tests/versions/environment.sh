#!/bin/sh
# environment.sh FOLDER EXTRA [ARGUMENTS OF PIP]: installs optzoo with an extra into an environment.
#
# Where there is none yet, it is created with $PYTHON, or else with the newest Python on the PATH on
# which the installation works: a very new one may have no wheels of JAX or TensorFlow yet.
folder=$1 extra=$2
shift 2

install() {
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    --editable ".[$extra]" "$@"
}

if [ -x "$folder/bin/python" ]; then
  install "$@"
  exit
fi
if [ -n "$PYTHON" ]; then echo "$PYTHON"; else sh "$(dirname "$0")/pythons.sh"; fi | {
  while read -r python; do
    echo "setting up $folder with $python"
    "$python" -m venv "$folder" && install "$@" </dev/null && exit 0
    rm -rf "$folder"
    echo "$folder could not be set up with $python: see above" >&2
  done
  echo "no Python >= 3.11 on the PATH on which .[$extra] can be installed; name one: PYTHON=..." >&2
  exit 1
}
