"""What of a run is finished, by its manifests: they name the inputs and the parameters that each stage worked on.

The code is not compared: after a change of code, remove the folder of the sweep.
"""

from typing import Any

from mdc.config import Params
from mdc.files import MANIFEST, fingerprint, read_json, sha256
from mdc.stages import Folders
from mdc.train.work import BOOKKEEPING


def stages_left(params: Params) -> list[str]:
    """The stages of a run that are not finished: the first whose manifest is not of these inputs, and all after it."""
    at = Folders.of(params.paths)
    stages = {"pretrain": at.model, "extract": at.features, "evaluate": at.evaluation}
    for number, (stage, folder) in enumerate(stages.items()):
        if not (folder / MANIFEST).is_file():
            return list(stages)[number:]
        found = read_json(folder / MANIFEST)["inputs"]
        if any(found.get(name) != value for name, value in _inputs(stage, params, at).items()):
            return list(stages)[number:]
    return []


def _inputs(stage: str, params: Params, at: Folders) -> dict[str, Any]:
    """What the manifest of a finished stage names as its inputs; the stages before it are finished."""
    shards = sha256(at.shards / MANIFEST)
    if stage == "pretrain":
        return {"shards": shards, "params": fingerprint(params.pretrain.model_dump(exclude=BOOKKEEPING))}
    inputs = {"shards": shards, "model": sha256(at.model / MANIFEST)}
    if stage == "extract":
        return {**inputs, "params": params.extract.model_dump(mode="json")}
    return {**inputs, "features": sha256(at.features / MANIFEST), "params": params.evaluate.model_dump(mode="json")}
