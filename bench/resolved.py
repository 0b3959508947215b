"""Reads pip's installation report and says what would be installed; 1 where torch or CUDA is.

    make resolved
"""

import json
import sys

report = json.load(sys.stdin)
names = {i["metadata"]["name"].lower(): i["metadata"]["version"] for i in report["install"]}
heavy = sorted(n for n in names if n in ("torch", "triton") or n.startswith(("nvidia-", "cuda-")))
for name, version in sorted(names.items()):
    print(f"{name}=={version}")
print(f"{len(names)} packages; torch or CUDA: {', '.join(heavy) or 'none'}")
sys.exit(1 if heavy else 0)
