# Run by the Dockerfile in the last stage of a build: installs pdserve beside its dependencies, takes
# the symbols of a debugger out of their libraries, and lists what is there in /opt/pdserve/sbom.json.
set -eu
/tmp/tools/bin/pip --python /opt/pdserve/bin/python install -q --no-deps /wheels/*.whl
# Not of wheels that bring libraries along (NAME.libs): their files were patched, and strip breaks them.
find /opt/pdserve -name '*.so' -not -path '*.libs/*' -not -path '*/numpy/*' | while read -r library; do
  strip --strip-unneeded "$library"
done
find /opt/pdserve -type d -name tests \( -path '*/numpy/*' -o -path '*/greenlet/*' \) \
  -prune -exec rm -rf {} +
/tmp/tools/bin/cyclonedx-py environment /opt/pdserve/bin/python \
  --output-reproducible -o /opt/pdserve/sbom.json
