"""Reconstruct a photograph from one vector: python examples/reconstruct_photo.py PHOTO.jpg OUT.png"""

import sys

import finola

photo, out = sys.argv[1:]
model = finola.create_model("finola_mfw720_c768_r8", pretrained=True).eval()
result = finola.reconstruct(model, photo)  # tile=True takes the whole image, one vector for each square
print(f"{model.config.embed_dim} numbers, {result.psnr:.2f} dB")
result.panel().save(out)
