"""`python -m rollstream.services.engine`"""

from __future__ import annotations

import asyncio
import os
import sys

from rollstream.services.engine.options import Fault, parse


def main(argv: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; 0 then, 1 where vLLM does not come up, 2 for a fault."""
    try:
        options = parse(argv)
        if options.backend == "vllm":
            from rollstream.services.engine.vllm import check_vllm, serve_vllm

            if options.check:
                print(check_vllm(options))
                return 0
            return asyncio.run(serve_vllm(options))
        # Before numpy is loaded: one thread a product; our own threads share the sequences.
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
            os.environ.setdefault(name, "1")
        from rollstream.services.engine.server import check, serve

        if options.check:
            print(check(options))
            return 0
        asyncio.run(serve(options))
    except Fault as fault:
        print(f"engine: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
