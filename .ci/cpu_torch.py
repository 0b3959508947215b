"""0 where pip would install a CPU build of this torch version: one without CUDA packages.

    python .ci/cpu_torch.py 2.13.0
"""

import json
import subprocess
import sys

command = [
    sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
    "--disable-pip-version-check", "--report", "-", f"torch=={sys.argv[1]}",
]
done = subprocess.run(command, capture_output=True, text=True, timeout=300)
if done.returncode != 0:
    sys.exit(1)
names = [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]]
sys.exit(1 if any(name.startswith(("nvidia-", "cuda-")) for name in names) else 0)
