"""A kernel a step (finola.kernels.triton_sweep) beside products and row kernels, on a GPU, for several tiles.

    python benchmarks/fused_step.py [--out results/fused_step_gpu.json]

Rates are over the plain matrix product of the same run, C = 3072, batch 128, 16x16, bf16. FUSED in
finola/kernels/operators.py and the first lines of triton_sweep.py are to follow what comes out. On a CPU (--device cpu)
the products alone are timed, with few channels, to try the script.
"""

import argparse
import json
from pathlib import Path

import torch

from finola.evaluation.speed import bench_operator
from finola.files import write_json
from finola.kernels import operators
from finola.provenance import record

TILES = [  # (rows, channels, channels at a time), warps, stages
    ((64, 128, 64), 8, 4), ((64, 128, 64), 4, 4), ((128, 128, 64), 8, 3), ((128, 128, 64), 8, 4), ((64, 256, 64), 8, 3),
    ((128, 256, 64), 8, 3), ((128, 128, 32), 8, 4),
]


def variants(gpu: bool) -> list[tuple[str, dict]]:
    """(name, settings) of what is timed."""
    fused = [(f"fused, tiles {'x'.join(map(str, tiles))}, {warps} warps, {stages} stages",
              {"BLOCKS": {"cuda": tiles}, "WARPS": warps, "STAGES": stages}) for tiles, warps, stages in TILES]
    return [("products", {}), *(fused if gpu else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gpu = torch.device(args.device).type == "cuda"
    case = (128, 3072, 16, "bf16") if gpu else (2, 64, 8, "bf16")
    rows = []
    for name, settings in variants(gpu):
        operators.FUSED = bool(settings)
        try:
            rows.append({"variant": name, **settings, **_timed(case, args.device, settings)})
        except Exception as error:  # a tile that needs more memory than there is
            rows.append({"variant": name, **settings, "error": " ".join(str(error).split())[:300]})
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            write_json(args.out, record(torch.device(args.device), {"case": case, "results": rows}))


def _timed(case: tuple[int, int, int, str], device: str, settings: dict) -> dict:
    if settings:
        from finola.kernels import triton_sweep

        for name, value in settings.items():
            setattr(triton_sweep, name, value)
    result = bench_operator(*case, device=device, compare=False)
    return {"forward of product": round(result.forward_of_product, 3),
            "forward+backward of product": round(result.forward_backward_of_product, 3)}


if __name__ == "__main__":
    main()
