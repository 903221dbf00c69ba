"""Values of the `pretrain` section by preset name; a file of its own, so that only these make a model out of date."""

from typing import Any


def _vit(name: str, width: int, depth: int, heads: int, **rest: Any) -> dict[str, Any]:
    """A full-size preset: CapPa's decoder (half the encoder's depth) and schedule under a timm ViT at 224 pixels."""
    return {
        "image_size": 224,
        "encoder": name,
        "decoder_width": width,
        "decoder_depth": depth,
        "decoder_heads": heads,
        "embed_dim": 512,
        "steps": 100_000,
        "batch_size": 1024,
        "block_samples": 32,
        "lr": 1e-3,
        "warmup_steps": 5_000,
        "weight_decay": 0.1,
        "crop_min_area": 0.5,
        "log_every": 50,
        "validate_every": 2_000,
        "checkpoint_every": 2_000,
        **rest,
    }


_NANO: dict[str, Any] = {
    "image_size": 32,
    "encoder": "vit_tiny_patch16_224",
    "encoder_options": {"patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 4},
    "decoder_width": 128,
    "decoder_depth": 2,
    "decoder_heads": 4,
    "embed_dim": 128,
    "steps": 1_500,
    "batch_size": 128,
    "lr": 1.5e-3,
    "warmup_steps": 100,
    "weight_decay": 0.3,
    "crop_min_area": 0.35,
    "flip": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    # minutes on two cores: the demo
    "nano": _NANO,
    # a quarter of an hour on two cores: what more training gives on the sample
    "sample-long": {
        **_NANO,
        "encoder_options": {**_NANO["encoder_options"], "drop_path_rate": 0.1},
        "steps": 4_000,
        "warmup_steps": 200,
        "validate_every": 500,
    },
    # a first real run on one small GPU
    "tiny": {
        "image_size": 64,
        "encoder": "vit_tiny_patch16_224",
        "encoder_options": {"patch_size": 8, "embed_dim": 192, "depth": 12, "num_heads": 3},
        "decoder_width": 192,
        "decoder_depth": 4,
        "decoder_heads": 3,
        "embed_dim": 256,
        "steps": 20_000,
        "batch_size": 512,
        "lr": 1e-3,
        "warmup_steps": 1_000,
        "weight_decay": 0.05,
        "validate_every": 1_000,
        "checkpoint_every": 1_000,
    },
    "vit_b32": _vit("vit_base_patch32_224", 768, 6, 12),
    "vit_b16": _vit("vit_base_patch16_224", 768, 6, 12),
    "vit_l14": _vit("vit_large_patch14_224", 1024, 12, 16, embed_dim=768, lr=8e-4),
}
