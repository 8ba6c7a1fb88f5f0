"""The operator in a model of your own: a few layers around one vector, fitted to eight images.

`Finola` is an ordinary module, q (B, C) -> z (B, C, H, W). Here it grows an 8x8 map from the vector of a small
encoder, and one layer paints a 4x4 patch at each position.
"""

import torch
from torch import nn

from finola import Finola


class TinyAutoencoder(nn.Module):
    def __init__(self, channels: int = 128):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), nn.GELU(), nn.Flatten(), nn.LazyLinear(channels))
        self.operator = Finola(channels, size=(8, 8), origin="center")
        self.painter = nn.Sequential(nn.Conv2d(channels, 48, 1), nn.PixelShuffle(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.encoder(x)  # (B, 3, 32, 32) -> (B, C)
        z = self.operator(q)  # (B, C, 8, 8)
        return self.painter(z)  # (B, 3, 32, 32)


def main(steps: int = 300) -> None:
    torch.manual_seed(0)
    pictures = nn.functional.interpolate(torch.rand(8, 3, 4, 4), size=32, mode="bicubic").clamp(0, 1)
    model = TinyAutoencoder()
    model(pictures)  # sizes the lazy layer
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps + 1):
        loss = nn.functional.mse_loss(model(pictures), pictures)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0:
            print(f"step {step:3}: {-10 * loss.log10():.2f} dB")


if __name__ == "__main__":
    main()
