"""A latent diffusion model as it is fine-tuned: images through a frozen VAE, captions through a
frozen text encoder, and a UNet that learns to predict noise.

trainpace forecast examples/tasks/diffusion.py:text_to_image --gpu A100 --batch 8 --precision
amp_bf16 trainpace forecast diffusers:unet/config.json --gpu A100        the UNet alone, from its
configuration

The models are small and random: put from_pretrained in their place.
"""

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import nn
from torch.nn.functional import mse_loss
from transformers import CLIPTextConfig, CLIPTextModel

SIDE, TOKENS, WIDTH, VOCABULARY = 64, 16, 32, 1000


class TextToImage(nn.Module):
    """Its call is its loss.

    What is frozen runs without gradients, and has neither them nor optimizer states.
    """

    def __init__(self):
        super().__init__()
        self.vae = AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[32, 32, 64, 64],
            latent_channels=4,
            norm_num_groups=8,
        )
        text = CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        self.text_encoder = CLIPTextModel(text)
        self.unet = UNet2DConditionModel(
            sample_size=SIDE // 8,
            block_out_channels=[32, 64],
            layers_per_block=1,
            cross_attention_dim=WIDTH,
            down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
            up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
            attention_head_dim=8,
            norm_num_groups=8,
        )
        self.vae.requires_grad_(False)
        self.text_encoder.requires_grad_(False)
        self.schedule = DDPMScheduler(num_train_timesteps=1000)

    def forward(self, pixels, tokens):
        with torch.no_grad():
            latents = self.vae.encode(pixels).latent_dist.mean * self.vae.config.scaling_factor
            text = self.text_encoder(tokens).last_hidden_state
        noise = torch.randn_like(latents)
        times = torch.randint(0, 1000, (len(latents),), device=latents.device)
        noisy = self.schedule.add_noise(latents, noise, times)
        return mse_loss(self.unet(noisy, times, text).sample, noise)


def text_to_image():
    model = TextToImage()
    data = [
        (torch.randn(3, SIDE, SIDE), torch.randint(0, VOCABULARY, (TOKENS,))) for _ in range(32)
    ]
    return model, None, torch.optim.AdamW(model.unet.parameters()), data
