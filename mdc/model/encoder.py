"""The vision encoder: a timm ViT without class token and head. Images in, patch features out.

Letters: B batch, C channels, H W image size, P patches, D width.
"""

import difflib
from typing import Any

import timm
from torch import Tensor, nn

from mdc.config import PretrainParams
from mdc.errors import UserError

# From the strictest wish to the laxest: families of ViT differ in the options they know. Where a family cannot do
# without a class token, the token stays inside and is cut from the output.
_POOLING: tuple[dict[str, Any], ...] = (
    {"class_token": False, "global_pool": "", "fc_norm": False},
    {"class_token": False, "global_pool": ""},
    {"global_pool": ""},
)
_DROPPED = ("cls_token", "head.", "attn_pool.", "fc_norm.")  # of pretrained weights: what has no place here


class Encoder(nn.Module):
    """A timm ViT as `images_BCHW -> patches_BPD`, after the final norm. width: D. patches: P."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit
        self.width = int(vit.num_features)  # type: ignore[arg-type]
        self.patches = int(vit.patch_embed.num_patches)  # type: ignore[union-attr,arg-type]
        self.prefix = int(vit.num_prefix_tokens)  # type: ignore[arg-type]

    def blocks(self) -> list[nn.Module]:
        """The layers, where timm keeps them apart, as it does for every plain ViT."""
        return list(getattr(self.vit, "blocks", nn.Sequential()).children())

    def block(self, layer: int | None) -> int | None:
        """The number from 0 of a block, which may be counted from the end, as -1; None for the last one.

        Raises UserError where there is none.
        """
        depth = len(self.blocks())
        if layer is None:
            return None
        if not -depth <= layer < depth:
            raise UserError(f"layer {layer}: the encoder has blocks 0 to {depth - 1}, or -{depth} to -1 from its end")
        return layer % depth if layer % depth < depth - 1 else None

    def forward(self, images_BCHW: Tensor, layer: int | None = None) -> Tensor:
        """layer: the block whose output it is, see `block`, behind the final norm in any case."""
        if (block := self.block(layer)) is not None:
            return self.vit.forward_intermediates(  # type: ignore[operator]
                images_BCHW, indices=[block], norm=True, output_fmt="NLC", intermediates_only=True
            )[0]
        features_BPD = self.vit.forward_features(images_BCHW)  # type: ignore[operator]
        return features_BPD[:, self.prefix :] if self.prefix else features_BPD


def _create(config: PretrainParams, options: dict[str, Any]) -> nn.Module:
    """The timm model with random weights, made with as much of `_POOLING` as its family knows."""
    problem: Exception | None = None
    for pooling in _POOLING:
        try:
            return timm.create_model(config.encoder, img_size=config.image_size, num_classes=0, **pooling, **options)
        except (TypeError, AssertionError) as error:  # timm's ways to refuse an option
            problem = error
    raise UserError(
        f"pretrain.encoder {config.encoder!r} does not take encoder_options {config.encoder_options} "
        f"at image_size {config.image_size}: {problem}; option names differ between timm's families"
    )


def _load_pretrained(vit: nn.Module, config: PretrainParams, options: dict[str, Any], weights: Any) -> None:
    """Copy timm's weights into `vit`.

    They were made with a class token, so timm first loads them as they are, resizes the position embeddings, and
    then what belongs to class token, pooling and head is left behind.
    """
    overlay = None if weights is None else {"file": str(weights)}
    try:
        source = timm.create_model(
            config.encoder, pretrained=True, pretrained_cfg_overlay=overlay, img_size=config.image_size, **options
        )
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"no pretrained weights for pretrain.encoder {config.encoder!r}: {error}; set encoder_pretrained: false, "
            "or name a file of timm weights in encoder_options: {checkpoint_path: FILE}"
        ) from error
    state = source.state_dict()
    if "fc_norm.weight" in state and "norm.weight" not in state:
        state |= {name.removeprefix("fc_"): value for name, value in state.items() if name.startswith("fc_norm.")}
    own = vit.state_dict()
    if "pos_embed" in own and "pos_embed" in state:
        state["pos_embed"] = state["pos_embed"][:, -own["pos_embed"].shape[1] :]
    missing, unexpected = vit.load_state_dict(state, strict=False)
    unexpected = [name for name in unexpected if not name.startswith(_DROPPED)]
    if missing or unexpected:
        raise UserError(
            f"the weights of pretrain.encoder {config.encoder!r} do not fit its patch features: "
            f"missing {missing[:5]}, left over {unexpected[:5]}"
        )


def build_encoder(config: PretrainParams) -> Encoder:
    """The encoder that `config` names.

    With `encoder_pretrained`, position embeddings of another image size are resized by timm, and
    `encoder_options: {checkpoint_path: FILE}` takes a file of timm weights in place of a download.
    Raises UserError for an unknown name, an option that its family does not know, or a model that is no plain ViT.
    """
    name = config.encoder.split(".")[0]
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models("*vit*"), n=3)
        raise UserError(f"unknown pretrain.encoder {config.encoder!r}; close names in timm: {', '.join(close) or '-'}")
    options = dict(config.encoder_options)
    weights = options.pop("checkpoint_path", None)
    vit = _create(config, options)
    plain = all(hasattr(vit, part) for part in ("num_prefix_tokens", "patch_embed", "norm", "num_features"))
    if not plain or isinstance(vit.norm, nn.Identity):
        raise UserError(
            f"pretrain.encoder {config.encoder!r} ({type(vit).__name__}) is no plain ViT with patch features after a "
            "final norm; take one such as vit_base_patch16_224"
        )
    patch = vit.patch_embed.patch_size  # type: ignore[union-attr]
    side = int(max(patch) if isinstance(patch, tuple | list) else patch)  # type: ignore[arg-type]
    if config.image_size % side:
        raise UserError(
            f"pretrain.image_size {config.image_size} is no multiple of the patch size {side} of {config.encoder}: "
            f"the border would be lost; take {config.image_size // side * side or side}"
        )
    if config.encoder_pretrained:
        _load_pretrained(vit, config, options, weights)
    return Encoder(vit)
