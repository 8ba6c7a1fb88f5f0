"""The kernels compile for a GPU that is not there; in a process of their own, without the interpreter."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from finola.kernels import triton_rows, triton_sweep

HALF, INTEGERS = {half}, {integers}
FLAGS = dict(ROWS=64, CHANNELS=128, INNER=64, TILES=32, KEEP=True, LINE=True, MEAN=True, BLOCK=1024)

def compiled(kernel, warps):
    types = dict()
    for name in kernel.arg_names:
        if name.isupper():
            types[name] = "constexpr"
        elif name in ("eps", "share"):
            types[name] = "fp32"
        else:
            types[name] = "i32" if name in INTEGERS else "*bf16" if name in HALF else "*fp32"
    constants = {{name: FLAGS[name] for name in kernel.arg_names if name.isupper()}}
    return triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32),
                          options=dict(num_warps=warps))

for kernel in (triton_rows._normalise, triton_rows._ungrow):
    assert compiled(kernel, triton_rows.WARPS).asm["cubin"]
assert "wgmma" in compiled(triton_sweep._step, triton_sweep.WARPS).asm["ptx"]  # a Hopper's own products
""".format(half={"rounded", "next_rounded", "matrix", "normal", "inward"},
           integers={"rows", "batch", "channels", "tiles", "line_stride", "image_stride"})


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100(tmp_path):
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILE], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
