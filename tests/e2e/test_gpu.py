"""What a GPU must get right; `bash benchmarks/gpu.sh` runs it. Skipped elsewhere."""

import signal

import pytest
import torch

from finola import autoregress, create_model, load_weights, save_weights
from finola.kernels.grid import DIRECTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def gradients(q, weights, size, grad, autocast=None):
    q, weights = q.detach().requires_grad_(), {d: w.detach().requires_grad_() for d, w in weights.items()}
    with torch.autocast(q.device.type, autocast, enabled=autocast is not None):
        z = autoregress(q, size, **weights)
    return [z, *torch.autograd.grad(z, [q, *weights.values()], grad.to(z))]


@pytest.mark.parametrize(("dtype", "autocast", "tolerance"), [
    (torch.float64, None, 1e-10), (torch.float32, None, 1e-4), (torch.float32, torch.bfloat16, 2e-2),
    (torch.bfloat16, None, 2e-2)])
@pytest.mark.parametrize("size", [(16, 16), (5, 9)])
def test_the_operator_equals_the_cpu_in_float64(size, dtype, autocast, tolerance):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(8, 256, generator=generator, dtype=torch.float64)
    weights = {d: 0.1 / 16 * torch.randn(256, 256, generator=generator, dtype=torch.float64) for d in DIRECTIONS}
    grad = torch.randn(8, 256, *size, generator=generator, dtype=torch.float64)
    expected = gradients(q, weights, size, grad)
    actual = gradients(q.cuda().to(dtype), {d: w.cuda().to(dtype) for d, w in weights.items()}, size, grad, autocast)
    for a, e in zip(actual, expected, strict=True):
        assert (a.double().cpu() - e).norm() / e.norm() < tolerance


@pytest.mark.parametrize("size", [(16, 16), (5, 9)])
def test_a_kernel_a_step_equals_the_cpu_in_float64(size, monkeypatch):
    from finola.kernels import operators

    monkeypatch.setattr(operators, "FUSED", True)
    test_the_operator_equals_the_cpu_in_float64(size, torch.float32, torch.bfloat16, 2e-2)


def test_a_compiled_model_records_cuda_graphs():
    model = create_model("finola_mfw720_c768_r8").cuda()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x = torch.rand(4, 3, 128, 128, device="cuda")
    for _ in range(4):  # the first calls compile and record
        torch.compiler.cudagraph_mark_step_begin()
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            (run(x) - x).square().mean().backward()
            gradients.append([p.grad.clone() for p in model.autoregression.parameters()])
    for eager, graphed in zip(*gradients, strict=True):
        assert (eager - graphed).norm() <= 1e-3 * eager.norm()


def test_a_model_trains_and_its_weights_travel(tmp_path):
    torch.manual_seed(0)
    model = create_model("finola_mfw720_c768_r8").cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    x = torch.rand(16, 3, 128, 128, device="cuda")
    losses = []
    for _ in range(20):
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    save_weights(model, tmp_path / "w.safetensors")
    with torch.no_grad():
        on_cpu = load_weights(tmp_path / "w.safetensors").eval()(x.cpu())
        torch.testing.assert_close(model.eval()(x).cpu(), on_cpu, rtol=0, atol=2e-2)


@pytest.mark.parametrize(("recipe", "overrides"), [
    ("masked_b_w720", ["--model.block_size", "2", "--model.decoder_depth", "1"]),
    ("masked_e_w720", ["--model.block_size", "2"]),
    ("lin_w720", ["--data.augment", "false"]),
    ("tran1_ft_w720", ["--optim.mixup", "0.8", "--optim.cutmix", "1.0"]),
])
def test_a_recipe_runs_on_the_gpu(recipe, overrides, images, tmp_path):
    from finola.training.engine import fit
    from finola.training.recipe import load_recipe

    recipe = load_recipe(f"imagenette/{recipe}", [
        "--data.image_size", "64", "--data.resident", "true", "--data.resident_size", "64", "--optim.epochs", "2",
        "--optim.batch_size", "6", "--trainer.accelerator", "gpu", "--trainer.devices", "1", *overrides])
    result = fit(recipe, [images / "train"], [images / "val"], tmp_path / "run")
    assert result["finished"] and result["step"] == 4
    assert load_weights(tmp_path / "run" / "weights.safetensors").config.image_size == 64


def test_a_run_resumes_in_mid_epoch_on_the_gpu(recipe_file, images, tmp_path, monkeypatch):
    from training import signal_at

    from finola.training.engine import fit
    from finola.training.recipe import load_recipe
    from finola.training.tasks.reconstruction import ReconstructionTask

    recipe = load_recipe(recipe_file, ["--trainer.accelerator", "gpu", "--trainer.devices", "1"])
    run = [images / "train"], [images / "val"], tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_at(patch, ReconstructionTask, 1, signal.SIGTERM)  # the second of three steps of the first epoch
        with pytest.raises(SystemExit):
            fit(recipe, *run)
    result = fit(recipe, *run, resume=True)
    assert result["finished"] and result["step"] == 6
    assert [point["epoch"] for point in result["history"]] == [0, 1]
    assert all(point["train_loss"] > 0 for point in result["history"])


@pytest.mark.parametrize("kind", ["detr", "mask_rcnn"])
def test_a_detector_trains_on_the_gpu_and_finds_the_same_on_the_cpu(kind, tmp_path):
    pytest.importorskip("faster_coco_eval", reason="needs the extra 'detection'")
    from coco_data import RECIPES, make_coco

    from finola.detection import CocoDetection, evaluate
    from finola.training.engine import fit
    from finola.training.recipe import load_recipe

    coco = make_coco(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPES[kind])
    recipe = load_recipe(tmp_path / "recipe.yaml", [
        "--trainer.accelerator", "gpu", "--trainer.devices", "1", "--trainer.precision", "bf16-mixed"])
    result = fit(recipe, [coco], [coco], tmp_path / "run")
    assert result["finished"] and result["val_box_ap"] is not None
    model = load_weights(tmp_path / "run" / "weights.safetensors").eval()
    dataset = CocoDetection(coco)
    on_cpu = evaluate(model, dataset).scores
    on_gpu = evaluate(model.cuda(), dataset).scores
    assert on_gpu["box_ap"] == pytest.approx(on_cpu["box_ap"], abs=0.02)


def test_the_set_loss_on_the_gpu_equals_the_cpus():
    from finola.detection.matcher import set_losses

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 20, 6, generator=generator)
    boxes = 0.2 + 0.3 * torch.rand(3, 4, 20, 4, generator=generator)
    targets = [{"labels": torch.randint(5, (n,), generator=generator),
                "boxes": 0.2 + 0.3 * torch.rand(n, 4, generator=generator)} for n in (0, 3, 7, 30)]
    expected = set_losses(logits, boxes, targets)
    actual = set_losses(logits.cuda(), boxes.cuda(), [{k: v.cuda() for k, v in t.items()} for t in targets])
    for name in expected:
        torch.testing.assert_close(actual[name].cpu(), expected[name], rtol=1e-4, atol=1e-5)
