# Run by the Dockerfile where the wheel is built: prints whose sources these are. That is the commit
# that the build was given, else a digest of the files in the folder, so that images of unlike sources
# never look alike.
set -eu
if [ -n "${1-}" ]; then
  printf %s "$1"
else
  find . -type f | LC_ALL=C sort | xargs -d '\n' sha256sum | sha256sum \
    | { read -r digest _ && printf 'sources-%.16s' "$digest"; }
fi
