"""Captions that the model writes for pictures it never trained on: whole ones, one unmasking step by step, and gaps."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mdc.config import CONTRASTIVE
from mdc.data.tokenizer import MASK, CaptionTokenizer
from mdc.draws import derive_seed
from mdc.generate.samplers import default_sampler, fill, generate
from mdc.objectives.scoring import MASKED
from mdc.train.checkpoint import LoadedModel


def written_captions(
    loaded: LoadedModel, patches_MPD: Tensor, uids: Sequence[str], captions: Sequence[str], length: int, seed: int
) -> dict[str, Any]:
    """What `captions.json` holds, for M pictures with their uids and true captions.

    length: tokens to write, the end token included. Only models that read masked captions show an unmasking and fill
    gaps. Models that write nothing give no examples and a note.
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
        parts["filled"] = _filled(loaded, patches_MPD, uids, captions, seed)
    return parts


def _filled(
    loaded: LoadedModel, patches_MPD: Tensor, uids: Sequence[str], captions: Sequence[str], seed: int
) -> list[dict[str, str]]:
    rows, templates, ids = [], [], []
    for row, caption in enumerate(captions):
        template = template_of(caption, loaded.tokenizer, derive_seed(seed, "gap", caption))
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


def template_of(caption: str, tokenizer: CaptionTokenizer, seed: int) -> str | None:
    """The caption with a gap for one word, drawn by seed among those of one token; None if only that word would stay.

    A gap is one token, so the number of gaps must not give a longer word away.
    """
    words = caption.split()
    single = [i for i, ids in enumerate(tokenizer.encode(words)) if len(ids) == 2] if len(words) > 1 else []
    if not single:
        return None
    gap = single[seed % len(single)]
    return " ".join([*words[:gap], MASK, *words[gap + 1 :]])
