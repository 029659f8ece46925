"""A container's health: status 0 when the address answers 2xx within 3 seconds. Slim images have no curl."""

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 3.0

if __name__ == "__main__":
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=TIMEOUT_S) as answer:
            sys.exit(not 200 <= answer.status < 300)
    except (urllib.error.URLError, OSError) as fault:
        print(f"{sys.argv[1]}: {fault}", file=sys.stderr)
        sys.exit(1)
