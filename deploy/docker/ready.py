#!/usr/bin/env python3
"""ready.py STATE_DIR: end with 0 if the server in this container answers /readyz with status 200."""

import ssl
import sys
import urllib.request
from pathlib import Path

port = sys.argv[2] if len(sys.argv) > 2 else "8512"
authority = Path(sys.argv[1], "authority.pem")  # of the server's own certificate
context = ssl.create_default_context(cafile=authority if authority.exists() else None)
scheme = "https" if authority.exists() else "http"
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
try:
    print(opener.open(f"{scheme}://127.0.0.1:{port}/readyz", timeout=4).read().decode())
except OSError as error:
    sys.exit(str(error))
