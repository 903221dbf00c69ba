"""Masked diffusion captioning: visual features learnt by reconstructing masked captions (arXiv 2510.26799).

`mdc.load(path)` opens a trained checkpoint. Everything heavy is imported on first use, so that
`import mdc` and `mdc --help` stay quick.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mdc.api import Captioner, load

__version__ = "0.1.0"

# Read by libraries when they load. None of them may call home or ask about updates. A value set by the user wins.
for _name, _value in {
    "NO_ALBUMENTATIONS_UPDATE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DVC_NO_ANALYTICS": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DO_NOT_TRACK": "1",
    # Pages of stack from torch's C++ side where a host is looked for or lost, which the launcher tells in a line.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Threads that spin while they wait take three times the CPU on busy cores.
    "OMP_WAIT_POLICY": "PASSIVE",
}.items():
    os.environ.setdefault(_name, _value)

__all__ = ["Captioner", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in ("load", "Captioner"):
        from mdc import api

        return getattr(api, name)
    raise AttributeError(f"module 'mdc' has no attribute {name!r}")
