"""Writes the digests of our images as a component, overlays/release/images, for any overlay.
Its folder job has that of the workers once more, for the ConfigMap that names the model's Job:
another image is another Job. An overlay names it after model-volume.

python3 k8s/pin.py REGISTRY/pdserve-control@sha256:... REGISTRY/pdserve-worker@sha256:...
"""

import re
import sys
from pathlib import Path

IMAGES = ("pdserve-control", "pdserve-worker")
REFERENCE = re.compile(
    r"(?P<repository>([^@\s]+/)?(?P<name>[^@:/\s]+))@(?P<digest>sha256:[0-9a-f]{64})"
)
HEAD = """\
# Written by k8s/pin.py.
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
"""
OF_JOB = """\
configMapGenerator:
  - name: pdserve-model
    behavior: merge
    literals: [image={digest}]
"""


def pinned(references: list[str]) -> tuple[str, str]:
    """The component, and that of the Job; raises ValueError, which names what is wrong with which
    reference."""
    found: dict[str, str] = {}
    digests: dict[str, str] = {}
    for reference in references:
        match = REFERENCE.fullmatch(reference)
        if match is None:
            raise ValueError(f"{reference!r} is not REPOSITORY@sha256:DIGEST")
        name, repository, digest = match["name"], match["repository"], match["digest"]
        if name not in IMAGES or name in found:
            raise ValueError(f"{reference!r}: give one each of {' and '.join(IMAGES)}")
        found[name] = f'  - {{ name: {name}, newName: "{repository}", digest: "{digest}" }}\n'
        digests[name] = digest
    if missing := set(IMAGES) - found.keys():
        raise ValueError(f"no reference of {' and '.join(sorted(missing))}")
    images = "images:\n" + "".join(found[name] for name in IMAGES)
    return HEAD + images, HEAD + OF_JOB.format(digest=digests["pdserve-worker"])


def main(references: list[str]) -> int:
    try:
        images, job = pinned(references)
    except ValueError as error:
        print(f"pin: {error}", file=sys.stderr)
        return 2
    folder = Path(__file__).parent / "overlays/release/images"
    for path, text in ((folder, images), (folder / "job", job)):
        path.mkdir(exist_ok=True)
        (path / "kustomization.yaml").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
