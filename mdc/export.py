"""A trained encoder for other tools: one folder that timm and transformers open, and the same as ONNX.

config.json, model.safetensors   timm's layout, which transformers reads through its wrapper of timm models
encoder.onnx                     images -> patches and features
README.md                        how to open them

All are opened again and compared with the encoder before the folder appears.

Letters: B batch, C channels, H W image size, P patches, D width.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mdc.config import PretrainParams
from mdc.data.transforms import MEAN, STD
from mdc.errors import UserError
from mdc.files import whole_folder, write_manifest
from mdc.model.encoder import Encoder
from mdc.train.checkpoint import LoadedModel

CONFIG, WEIGHTS, ONNX, README = "config.json", "model.safetensors", "encoder.onnx", "README.md"
TRIED = 3  # pictures that all copies are compared on
CLOSE = 1e-5  # of weights in another library
CLOSE_ONNX = 1e-4  # of another runtime's arithmetic

# From the best wish to the plainest: features are the mean of the patches after the final norm, or the patches alone.
# Families of ViT differ in the options they know, and some norm the mean in place of the patches.
_POOLINGS: tuple[dict[str, Any], ...] = (
    {"class_token": False, "global_pool": "avg", "fc_norm": False},
    {"global_pool": "avg", "fc_norm": False},
    {"class_token": False, "global_pool": ""},
    {"global_pool": ""},
)


@torch.no_grad()
def export_encoder(loaded: LoadedModel, output: Path, onnx: bool = True) -> None:
    """Write the folder. onnx: with `encoder.onnx`, which takes the extra `export`.

    Raises UserError if a copy's features differ from the encoder's, or ONNX is asked for and not installed.
    """
    encoder = loaded.model.encoder
    assert isinstance(encoder, Encoder)
    encoder.cpu()
    config = loaded.config.pretrain
    images_BCHW = torch.randn(
        TRIED, 3, config.image_size, config.image_size, generator=torch.Generator().manual_seed(0)
    )
    patches_BPD = encoder(images_BCHW)
    with whole_folder(output) as temporary:
        save_file(
            {name: tensor.contiguous() for name, tensor in encoder.vit.state_dict().items()},
            temporary / WEIGHTS,
            metadata={"format": "pt"},
        )
        pooled = _write_config(temporary, encoder, config, images_BCHW, patches_BPD)
        _check_transformers(temporary, encoder, images_BCHW, patches_BPD)
        if onnx:
            _write_onnx(temporary / ONNX, encoder, images_BCHW, patches_BPD)
        (temporary / README).write_text(_readme(encoder, config, pooled, onnx), encoding="utf-8")
        write_manifest(temporary, inputs={"model": loaded.fingerprint}, counts={})


def _write_config(
    folder: Path, encoder: Encoder, config: PretrainParams, images_BCHW: Tensor, patches_BPD: Tensor
) -> bool:
    """The first `config.json` with which timm gives equal patches. Returns whether it also takes their mean."""
    for content in _configs(encoder, config):
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        try:
            copy: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        except (TypeError, AssertionError, RuntimeError):  # the family does not know an option, or has other weights
            continue
        pooled = content["global_pool"] == "avg"
        patches = copy.forward_features(images_BCHW)[:, encoder.prefix :]
        mean = copy(images_BCHW) if pooled else patches.mean(1)
        if _close(patches, patches_BPD, CLOSE) and _close(mean, patches_BPD.mean(1), CLOSE):
            return pooled
    raise UserError(f"timm's {config.encoder} with these weights gives other features, so it is not exported")


def _configs(encoder: Encoder, config: PretrainParams) -> Iterator[Mapping[str, Any]]:
    options = {name: value for name, value in config.encoder_options.items() if name != "checkpoint_path"}
    size = config.image_size
    pictures = {
        "input_size": [3, size, size],
        "fixed_input_size": True,
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "crop_mode": "center",
        "mean": [MEAN] * 3,
        "std": [STD] * 3,
        "num_classes": 0,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    for pooling in _POOLINGS:
        yield {
            "architecture": config.encoder.split(".")[0],
            "num_classes": 0,
            "num_features": encoder.width,
            "global_pool": pooling["global_pool"],
            "model_args": {**options, **pooling, "img_size": size},
            "pretrained_cfg": pictures,
        }


def _close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    return ours.shape == theirs.shape and bool(torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance))


def _check_transformers(folder: Path, encoder: Encoder, images_BCHW: Tensor, patches_BPD: Tensor) -> None:
    from transformers import AutoModel

    found = AutoModel.from_pretrained(folder).eval()(pixel_values=images_BCHW)
    if not _close(found.last_hidden_state[:, encoder.prefix :], patches_BPD, CLOSE):
        raise UserError("transformers gives other features than the encoder; it is not exported")


class _Outputs(nn.Module):
    """What the ONNX graph gives: patches `[B, P, D]` and their mean `[B, D]`."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        patches_BPD = self.encoder(images)
        return patches_BPD, patches_BPD.mean(1)


def _write_onnx(path: Path, encoder: Encoder, images_BCHW: Tensor, patches_BPD: Tensor) -> None:
    """One file for any number of pictures, compared at one and at all of them."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  # torch's exporter needs it
    except ImportError as error:
        raise UserError(
            f"ONNX needs the package {error.name}; install mdc[export], or leave it out (--no-onnx)"
        ) from None

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.onnx.export(
        _Outputs(encoder).eval(),
        (images_BCHW,),
        path,
        dynamo=True,
        input_names=["images"],
        output_names=["patches", "features"],
        dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for count in (1, TRIED):
        patches, features = map(torch.from_numpy, session.run(None, {"images": images_BCHW[:count].numpy()}))
        wanted_BPD = patches_BPD[:count]
        if not (_close(patches, wanted_BPD, CLOSE_ONNX) and _close(features, wanted_BPD.mean(1), CLOSE_ONNX)):
            raise UserError("onnxruntime gives other features than the encoder; it is not exported")


def _readme(encoder: Encoder, config: PretrainParams, pooled: bool, onnx: bool) -> str:
    size, prefix = config.image_size, encoder.prefix
    skipped = f" The first {prefix} tokens are no patches." if prefix else ""
    mean = "" if pooled else f"[:, {prefix}:].mean(1)" if prefix else ".mean(1)"
    hidden = "pooler_output" if pooled else f"last_hidden_state{mean}"
    text = f"""# Vision encoder, pretrained from captions (objective {config.objective})

Images: the centre square at {size} x {size} pixels, bilinear, scaled to -1 .. 1. Features: {encoder.width} numbers, the
mean of {encoder.patches} patches after the final norm.{skipped}

```python
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
patches = model.forward_features(transform(image)[None])
features = model(transform(image)[None]){mean}  # [1, {encoder.width}]
```

```python
from transformers import AutoImageProcessor, AutoModel

model = AutoModel.from_pretrained("FOLDER").eval()
inputs = AutoImageProcessor.from_pretrained("FOLDER")(image, return_tensors="pt")
patches = model(**inputs).last_hidden_state
features = model(**inputs).{hidden}
```
"""
    if onnx:
        text += """
```python
import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/encoder.onnx")
patches, features = session.run(None, {"images": images})  # float32 [B, 3, H, W] in -1 .. 1
```
"""
    return text
