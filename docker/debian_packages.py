"""Lists what an image has besides its Python packages, which sbom.json has: Debian's packages, as
dpkg knows them, and Python itself. Prints a CycloneDX document; the standard library is enough.
"""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

FIELDS = ("binary:Package", "Version", "Architecture", "source:Package", "db:Status-Status")
FORMAT = "\t".join(f"${{{name}}}" for name in FIELDS) + "\n"


def debian(text: str, release: str) -> list[dict[str, Any]]:
    """Components of dpkg-query's lines in `FORMAT`, of a Debian release such as debian-12."""
    found = []
    for line in text.splitlines():
        package, version, architecture, source, status = line.split("\t")
        if status != "installed":  # what was removed has left its settings
            continue
        name = package.partition(":")[0]
        at = f"{quote(version, safe='')}?arch={architecture}&distro={release}"
        purl = f"pkg:deb/debian/{name}@{at}"
        properties = [{"name": "source", "value": source}]
        found.append(
            {"type": "library", "name": name, "version": version, "purl": purl}
            | {"bom-ref": purl, "properties": properties}
        )
    return found


def python() -> dict[str, Any]:
    """The interpreter, which may be no package of Debian's."""
    version = platform.python_version()
    purl = f"pkg:generic/python@{version}"
    return {"type": "platform", "name": "python", "version": version, "purl": purl, "bom-ref": purl}


def main() -> None:
    lines = Path("/etc/os-release").read_text().splitlines()
    facts = {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}
    words = ["dpkg-query", "--show", f"--showformat={FORMAT}"]
    text = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    release = f"{facts['ID']}-{facts.get('VERSION_ID', '')}"
    parts = [*debian(text, release), python()]
    listed = {"bomFormat": "CycloneDX", "specVersion": "1.6", "components": parts}
    print(json.dumps(listed, indent=1))


if __name__ == "__main__":
    main()
