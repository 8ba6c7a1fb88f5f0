# For gpu.sh and gpu_train.sh, which source it: the package is the copy of the tree they lie in, with nothing installed.
# Sets $python (from $PYTHON) and $device (from $DEVICE), PYTHONPATH, and FINOLA_COMMIT from the file COMMIT where neither
# git nor the caller says it. Wheels in wheels/ are unpacked into runs/site.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
if compgen -G "wheels/*.whl" > /dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --upgrade \
        --target runs/site wheels/*.whl && PYTHONPATH=$PWD:$PWD/runs/site
fi
if [ -z "${FINOLA_COMMIT:-}" ] && [ -f COMMIT ]; then
    FINOLA_COMMIT=$(cat COMMIT)
    export FINOLA_COMMIT
fi
"$python" - << 'END'
import importlib.util
import sys

import torch

import finola
from finola.provenance import commit

print(f"finola in {finola.__path__[0]}, commit {commit()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
needed = {"constriction": ".fnl files", "faster_coco_eval": "the test of detectors", "lightly": "MAE, SimMIM and MoCo",
          "lightning": "training", "timm": "encoders", "torchmetrics": "training", "pytest": "the GPU tests"}
for name, what in needed.items():
    if importlib.util.find_spec(name) is None:
        print(f"{name} is missing: without {what}")
END
