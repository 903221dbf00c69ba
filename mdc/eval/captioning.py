"""Captions that the model writes for pictures it never trained on: whole ones, one unmasking step by step, and gaps."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mdc.config import CONTRASTIVE
from mdc.data.tokenizer import MASK, CaptionTokenizer
from mdc.draws import derive_seed
from mdc.generate.samplers import default_sampler, fill, generate
from mdc.objectives.scoring import MASKED
from mdc.train.checkpoint import LoadedModel

LEARNABLE = 5  # training captions that hold a word before it is asked for


def written_captions(
    loaded: LoadedModel,
    patches_MPD: Tensor,
    uids: Sequence[str],
    captions: Sequence[str],
    known: Mapping[str, int],
    length: int,
    seed: int,
) -> dict[str, Any]:
    """What `captions.json` holds, for M pictures with their uids and true captions.

    known: how often each word stands in the training captions. length: tokens to write, the end token included. Only
    models that read masked captions show an unmasking and fill gaps; those that write nothing give a note.
    """
    objective = loaded.config.pretrain.objective
    if objective in CONTRASTIVE:
        return {"examples": [], "note": f"a model of objective {objective} compares captions but writes none"}
    sampler = default_sampler(objective)
    seeds = [derive_seed(seed, "caption", uid) for uid in uids]
    written = generate(loaded.model, loaded.config, patches_MPD, length, sampler, seed=seeds, trace=True)
    parts: dict[str, Any] = {
        "examples": [
            {"uid": uid, "caption": caption, "generated": loaded.tokenizer.decode(tokens), "sampler": sampler}
            | {"length": length}
            for uid, caption, tokens in zip(uids, captions, written.tokens_ML.tolist(), strict=True)
        ]
    }
    if objective in MASKED:
        states = [loaded.tokenizer.tokens(state_ML[0].tolist()) for state_ML in written.trace]
        parts["unmasking"] = {"uid": uids[0], "caption": captions[0], "steps": states}
        parts["filled"] = _filled(loaded, patches_MPD, uids, captions, known)
    return parts


def _filled(
    loaded: LoadedModel,
    patches_MPD: Tensor,
    uids: Sequence[str],
    captions: Sequence[str],
    known: Mapping[str, int],
) -> list[dict[str, str]]:
    rows, templates, ids = [], [], []
    for row, caption in enumerate(captions):
        template = template_of(caption, loaded.tokenizer, known)
        tokens = loaded.tokenizer.encode_template(template) if template else []
        if template and len(tokens) <= loaded.config.max_tokens:
            rows.append(row)
            templates.append(template)
            ids.append(tokens)
    if not rows:
        return []
    filled_ML = fill(loaded.model, loaded.config, patches_MPD[rows], ids)
    texts = [loaded.tokenizer.decode(tokens) for tokens in filled_ML.tolist()]
    return [
        {"uid": uids[row], "template": template, "text": text}
        for row, template, text in zip(rows, templates, texts, strict=True)
    ]


def template_of(caption: str, tokenizer: CaptionTokenizer, known: Mapping[str, int]) -> str | None:
    """The caption with a gap for the word that training saw least often, though often enough to learn it.

    A gap is one token, so that the number of gaps does not give a long word away. None if no word fits.
    """
    words = caption.split()
    tokens = tokenizer.encode(words) if len(words) > 1 else []
    whole = [len(ids) == 2 and ids[0] != tokenizer.vocabulary.unk_id for ids in tokens]
    fitting = [i for i, is_token in enumerate(whole) if is_token and known.get(words[i], 0) >= LEARNABLE]
    if not fitting:
        return None
    gap = min(fitting, key=lambda i: known[words[i]])
    return " ".join([*words[:gap], MASK, *words[gap + 1 :]])
