import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed

from mdc.config import PretrainParams
from mdc.errors import UserError
from mdc.model.encoder import build_encoder

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 2}


def params(encoder: str = "vit_tiny_patch16_224", image_size: int = 32, **fields: object) -> PretrainParams:
    options = fields.pop("encoder_options", SMALL)
    return PretrainParams.model_validate(
        {"encoder": encoder, "image_size": image_size, "encoder_options": options, **fields}
    )


def test_patch_features_come_after_the_final_norm_and_nothing_else_has_weights() -> None:
    encoder = build_encoder(params())
    patches_BPD = encoder(torch.randn(2, 3, 32, 32))
    assert patches_BPD.shape == (2, 4, 24) == (2, encoder.patches, encoder.width)
    torch.testing.assert_close(patches_BPD.mean(-1), torch.zeros(2, 4), atol=1e-5, rtol=0)  # a fresh norm centres
    torch.testing.assert_close(patches_BPD.std(-1, correction=0), torch.ones(2, 4), atol=1e-2, rtol=0)
    names = [name for name, _ in encoder.named_parameters()]
    assert not [name for name in names if any(part in name for part in ("cls", "head", "fc_norm", "pool"))]
    (encoder(torch.randn(2, 3, 32, 32)) ** 3).sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize(
    ("name", "options", "prefix"),
    [
        ("vit_relpos_small_patch16_224", SMALL, 0),
        ("beit_base_patch16_224", SMALL, 1),  # cannot do without its class token
        ("vit_small_patch14_reg4_dinov2", SMALL, 4),  # registers
        ("eva02_tiny_patch14_224", {**SMALL, "embed_dim": 32}, 0),
    ],
)
def test_other_families_give_patches_alone(name: str, options: dict[str, int], prefix: int) -> None:
    size = 28 if "14" in name else 32
    encoder = build_encoder(params(name, size, encoder_options=options))
    assert encoder.prefix == prefix
    assert encoder(torch.randn(1, 3, size, size)).shape == (1, encoder.patches, encoder.width) == (1, 4, encoder.width)
    assert not isinstance(encoder.vit.norm, torch.nn.Identity)


def test_pretrained_weights_lose_their_class_token_and_fit_another_image_size(tmp_path) -> None:
    source = timm.create_model("vit_tiny_patch16_224", **SMALL)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    options = {**SMALL, "checkpoint_path": str(tmp_path / "weights.pth")}
    same = build_encoder(params(image_size=224, encoder_options=options, encoder_pretrained=True))
    smaller = build_encoder(params(image_size=64, encoder_options=options, encoder_pretrained=True))
    own, theirs = smaller.vit.state_dict(), source.state_dict()
    assert all(torch.equal(own[name], theirs[name]) for name in own if name != "pos_embed")
    assert torch.equal(same.vit.pos_embed, source.pos_embed[:, 1:])
    resized = resample_abs_pos_embed(source.pos_embed, new_size=[4, 4], num_prefix_tokens=1)[:, 1:]
    torch.testing.assert_close(smaller.vit.pos_embed.detach(), resized.detach())


def test_weights_of_another_architecture_are_refused(tmp_path) -> None:
    torch.save(timm.create_model("vit_tiny_patch16_224", **{**SMALL, "depth": 1}).state_dict(), tmp_path / "other.pth")
    options = {**SMALL, "checkpoint_path": str(tmp_path / "other.pth")}
    with pytest.raises(UserError, match="no pretrained weights"):
        build_encoder(params(encoder_options=options, encoder_pretrained=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder": "vit_tiny_patch16_24"}, "close names in timm: vit_tiny_patch16_224"),
        ({"encoder_options": {"width": 8}}, "does not take encoder_options.*width.*option names differ"),
        ({"encoder": "swin_tiny_patch4_window7_224", "encoder_options": {}}, "no plain ViT"),
        ({"image_size": 40}, "no multiple of the patch size 16.*take 32"),
    ],
)
def test_mistakes_are_named_with_their_fix(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_encoder(params(**fields))
