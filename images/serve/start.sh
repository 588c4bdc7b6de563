#!/bin/bash
# Fetches the model that Vertex AI names and serves it on the port and routes that Vertex AI asks for.
set -euo pipefail
: "${AIP_STORAGE_URI:?the folder of the model, set by Vertex AI}"

python3 - "$AIP_STORAGE_URI" <<'PYTHON'
import sys

import fsspec

fsspec.filesystem("gs").get(f"{sys.argv[1].rstrip('/')}/", "/model/", recursive=True)
PYTHON

exec vllm serve /model --served-model-name model --host 0.0.0.0 --port "${AIP_HTTP_PORT:-8080}"
