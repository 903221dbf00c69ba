"""Hugging Face's captioner of the same sizes, for the rows that compare with it."""

from torch import Tensor, nn
from transformers import BertConfig, BertLMHeadModel, VisionEncoderDecoderModel, ViTConfig, ViTModel

from bench.training import BOS, PAD, PADDED, WORDS, Pairs, Theirs
from mdc.config import PretrainParams


def hugging_face(hyper: PretrainParams, words: int = WORDS) -> Theirs:
    """`VisionEncoderDecoderModel`: ViT-B/32 under a BERT decoder with cross-attention, dropout off, its own loss."""
    encoder = ViTModel(ViTConfig(image_size=hyper.image_size, patch_size=32), add_pooling_layer=False)
    decoder = BertLMHeadModel(
        BertConfig(
            vocab_size=words,
            hidden_size=hyper.decoder_width,
            num_hidden_layers=hyper.decoder_depth,
            num_attention_heads=hyper.decoder_heads,
            intermediate_size=4 * hyper.decoder_width,
            max_position_embeddings=PADDED,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            is_decoder=True,
            add_cross_attention=True,
            pad_token_id=PAD,
        )
    )
    model = VisionEncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.set_attn_implementation("sdpa")
    model.config.pad_token_id, model.config.decoder_start_token_id = PAD, BOS

    def loss(model: nn.Module, batch: Pairs) -> Tensor:
        labels_BL = batch.tokens_BL.masked_fill(batch.tokens_BL == PAD, -100)
        loss: Tensor = model(pixel_values=batch.images_BCHW, labels=labels_BL, use_cache=False).loss
        return loss

    return Theirs(hyper, model, loss)
