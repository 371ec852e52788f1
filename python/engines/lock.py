"""Print a lock from the report of pip install --report: a line for each package, with its version and the hash of its wheel."""

import json
import re
import sys
from pathlib import Path

report = json.loads(Path(sys.argv[1]).read_text())
lines = []
for item in report["install"]:
    name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
    sha256 = item["download_info"]["archive_info"]["hashes"]["sha256"]
    lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:{sha256}")
print("\n".join(sorted(lines)))
