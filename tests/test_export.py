"""The exported encoder as other people's tools open it, in processes of their own code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image

import mdc
from mdc.config import ModelConfig
from mdc.data.tokenizer import CaptionTokenizer
from mdc.errors import UserError
from mdc.export import export_encoder
from mdc.train.checkpoint import LoadedModel, initial_model, load_model, save_model

FAMILIES = {
    "vit_tiny_patch16_224": {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
    "vit_medium_patch16_reg4_gap_256": {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
    "vit_small_patch16_224": {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "reg_tokens": 3},
    "eva02_tiny_patch14_224": {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., Any]) -> Callable[[str], Path]:
    """`checkpoint(encoder)`: the folder of a model of random weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = CaptionTokenizer.train(["a red dog", "a blue cat"] * 5, vocab_size=60, lowercase=True)
    tokenizer.save(folder / "tokenizer.json")

    def make(encoder: str) -> Path:
        path = folder / encoder
        if not path.exists():
            pretrain = tiny_config("mdc", encoder=encoder, encoder_options=FAMILIES[encoder]).pretrain
            config = ModelConfig(pretrain=pretrain, vocabulary=tokenizer.vocabulary, max_tokens=8)
            path.mkdir()
            model = initial_model(config, seed=0)
            generator = torch.Generator().manual_seed(1)
            for parameter in model.parameters():  # far from uniform, so that a mistake shows
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
            save_model(path, model, config, folder / "tokenizer.json")
        return path

    return make


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    """Smooth ones, as photographs are."""
    corners = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    return [Image.fromarray(each).resize((48, 48), Image.Resampling.BICUBIC) for each in corners]


@pytest.mark.parametrize("encoder", FAMILIES)
def test_timm_and_transformers_give_equal_features(
    checkpoint: Callable[[str], Path], encoder: str, tmp_path: Path
) -> None:
    from transformers import AutoModel

    loaded = load_model(checkpoint(encoder))
    export_encoder(loaded, tmp_path / "out", onnx=False)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "README.md", "manifest.json"}
    images_BCHW = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    expected_BD = loaded.model.encode(images_BCHW).mean(1)  # type: ignore[operator]
    with torch.no_grad():
        theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()(images_BCHW)
        hugging = AutoModel.from_pretrained(tmp_path / "out").eval()(pixel_values=images_BCHW)
    pooled = theirs.ndim == 2  # the family of eva02 would norm the mean, so that it gives patches
    assert pooled == (not encoder.startswith("eva02"))
    torch.testing.assert_close(theirs if pooled else theirs.mean(1), expected_BD, atol=1e-5, rtol=1e-5)
    prefix = loaded.model.encoder.prefix  # type: ignore[union-attr]
    mean_BD = hugging.last_hidden_state[:, prefix:].mean(1)
    torch.testing.assert_close(mean_BD, expected_BD, atol=1e-5, rtol=1e-5)
    if pooled:
        torch.testing.assert_close(hugging.pooler_output, expected_BD, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encoder", ["vit_tiny_patch16_224", "vit_medium_patch16_reg4_gap_256"])
def test_onnx_gives_equal_outputs_for_any_number_of_pictures(
    checkpoint: Callable[[str], Path], encoder: str, tmp_path: Path
) -> None:
    loaded = load_model(checkpoint(encoder))
    export_encoder(loaded, tmp_path / "out")
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "encoder.onnx"))
    for count in (1, 2, 7):
        images_BCHW = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(count))
        patches, features = session.run(None, {"images": images_BCHW.numpy()})
        expected_BPD = loaded.model.encode(images_BCHW)  # type: ignore[operator]
        np.testing.assert_allclose(patches, expected_BPD.numpy(), atol=1e-4)
        np.testing.assert_allclose(features, expected_BPD.mean(1).numpy(), atol=1e-4)


def test_pictures_go_the_same_way_in_every_tool(
    checkpoint: Callable[[str], Path], pictures: list[Image.Image], tmp_path: Path
) -> None:
    """As its README says, and by `mdc.load` of the folder: resizing differs by what 8 bits between steps cost."""
    from transformers import AutoImageProcessor, AutoModel

    path = checkpoint("vit_tiny_patch16_224")
    export_encoder(load_model(path), tmp_path / "out", onnx=False)
    expected_BD = mdc.load(path).encode(pictures)
    again = mdc.load(tmp_path / "out")
    assert again.fingerprint != mdc.load(path).fingerprint
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        hugging = AutoModel.from_pretrained(tmp_path / "out").eval()(**processor(pictures, return_tensors="pt"))
    for theirs_BD in (again.encode(pictures), hugging.pooler_output):
        assert torch.cosine_similarity(theirs_BD - theirs_BD.mean(0), expected_BD - expected_BD.mean(0)).min() > 0.99


def test_an_encoder_that_would_come_out_differently_is_not_exported(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    loaded = load_model(checkpoint("vit_tiny_patch16_224"))
    odd = loaded.config.pretrain.model_copy(
        update={"encoder_options": {**FAMILIES["vit_tiny_patch16_224"], "depth": 3}}
    )
    wrong = LoadedModel(
        loaded.model, loaded.config.model_copy(update={"pretrain": odd}), loaded.tokenizer, loaded.fingerprint
    )
    with pytest.raises(UserError, match="is not exported"):
        export_encoder(wrong, tmp_path / "out")
    assert not (tmp_path / "out").exists()
