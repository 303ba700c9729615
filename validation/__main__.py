"""Entry point of `python -m validation`."""

import os
import sys
from importlib.util import find_spec

if __name__ == "__main__":
    # Each engine's thread has a team of OpenMP threads; on few cores the idle ones, if they spin, halve the speed.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
    for needed in ("rouge_score", "scipy"):
        if find_spec(needed) is None:
            print(f"validation: {needed} is not installed; pip install 'semblend-trt[validation]'.", file=sys.stderr)
            sys.exit(2)
    try:
        from validation.cli import main
    except KeyboardInterrupt:
        print("validation: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(main(sys.argv[1:]))
