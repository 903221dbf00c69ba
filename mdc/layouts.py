"""How lists of pictures and captions are laid out: values of the `download` section by name.

A file of its own, so that only these make a download out of date.
"""

from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "pairs": {},  # the defaults of mdc.config.DownloadParams
    "sample": {"uid_column": "uid", "label_column": "category", "group_column": "base"},
    # Train_GCC-training.tsv, Validation_GCC-1.1.0-Validation.tsv: https://ai.google.com/research/ConceptualCaptions
    "cc3m": {"header": ["caption", "url"]},
    # cc12m.tsv: https://github.com/google-research-datasets/conceptual-12m
    "cc12m": {"header": ["url", "caption"]},
    # parquet files of https://huggingface.co/datasets/UCSC-VLAA/Recap-DataComp-1B
    "recap-datacomp-1b": {"caption_column": ["re_caption", "org_caption"], "line_breaks": "space"},
    # captions_train2017.json: https://cocodataset.org/#format-data; columns are the keys of its images, and `caption`
    "coco": {"url_column": "coco_url", "uid_column": "id", "line_breaks": "space"},
}
