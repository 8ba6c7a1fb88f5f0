"""Wrong uses of the public names, for tests/test_types.py: a type checker must refuse each line marked with `# E`, with
that code, and no other line. Never imported."""

import torch

import finola

finola.autoregress("x", 3)  # E: arg-type
finola.autoregress(torch.zeros(1, 8), (4, 4), origin=1.5)  # E: arg-type
finola.autoregress(torch.zeros(1, 8), (4, 4), centre="center")  # E: call-arg
number: int = finola.create_model("finola_mfw720_c768_r8")  # E: assignment
finola.create_model("finola_mfw720_c768_r8", pretrained=2.5)  # E: call-overload
finola.load_weights(3)  # E: arg-type
finola.list_models(pattern=3)  # E: arg-type
finola.psnr(1.0, 2.0)  # E: arg-type
finola.AutoencoderConfig("mobileformer_w720", embed_dim="many")  # E: arg-type
print(finola.no_such_name)  # E: attr-defined

masked = finola.create_model("masked_finola_b_mfw720")
finola.reconstruct(masked, "photo.jpg")  # E: call-overload
model = finola.create_model("finola_mfw720_c768_r8", pretrained=True).eval()
finola.reconstruct(model, 5)  # E: call-overload
finola.reconstruct(model, "photo.jpg").psnr.upper()  # E: attr-defined
good: float = finola.reconstruct(model, "photo.jpg").psnr
several: list[finola.Reconstruction] = finola.reconstruct(model, ["a.jpg", torch.zeros(3, 8, 8)])
vector: torch.Tensor = model.encode(torch.zeros(1, 3, 128, 128))
